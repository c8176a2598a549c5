"""`SessionFacts`: the properties of a session that every kind of session has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any

from lmchat.generation.state import State
from lmchat.store.turns import Turn
from turbomind import Residence


class SessionFacts(ABC):
    """The properties of a session, of this process or behind a server."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Id of the session, 32 hexadecimal digits. It never changes and is never used again."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name, unique among the sessions of its owner."""

    @property
    @abstractmethod
    def owner(self) -> str:
        """Owner of the session. Pages are shared only within an owner."""

    @property
    @abstractmethod
    def created(self) -> datetime:
        """Time of creation, in UTC; templates see it as the date."""

    @property
    @abstractmethod
    def revision(self) -> int:
        """Number that rises with every stored change of the session, by any process. `refresh()`
        reads those of others."""

    @property
    @abstractmethod
    def tags(self) -> tuple[str, ...]:
        """Tags, in the order given."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """A copy of the metadata: texts by key, for the programs that use the session."""

    @property
    @abstractmethod
    def overflow(self) -> str:
        """Policy for a turn that does not fit the context: "refuse" or "drop"."""

    @property
    @abstractmethod
    def history(self) -> str:
        """The rule for earlier turns: "append" or "template"."""

    @property
    @abstractmethod
    def pinned(self) -> bool:
        """Whether its pages are retained longer than those of other sessions."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """A copy of the session's own generation settings."""

    @property
    @abstractmethod
    def template_variables(self) -> dict[str, Any]:
        """A copy of the variables that the template gets beside the messages."""

    @property
    @abstractmethod
    def interrupted(self) -> bool:
        """Whether the process ended during the last reply. `continue_()` extends it."""

    @property
    @abstractmethod
    def unanswered(self) -> str | None:
        """Text of a turn that was stopped, or whose process ended, before the first token of its
        reply, else None. It is not in the conversation and can be sent again. The next turn clears
        it."""

    @property
    @abstractmethod
    def notices(self) -> tuple[str, ...]:
        """Notices that the next reply will start with, such as damage found when the session was
        opened."""

    @property
    @abstractmethod
    def state(self) -> State:
        """Current activity."""

    @property
    @abstractmethod
    def turns(self) -> tuple[Turn, ...]:
        """Turns of the current conversation: the system prompt, if any, then users and replies."""

    @property
    def system(self) -> str | None:
        """System prompt, or None."""
        first = next(iter(self.turns), None)
        return first.text if first is not None and first.role == "system" else None

    @property
    @abstractmethod
    def dropped(self) -> tuple[Turn, ...]:
        """Users and replies before `turns` that were dropped from the prompt because the context
        was full (`set_overflow("drop")`), the oldest first. Readers see them above the others."""

    @property
    @abstractmethod
    def replies(self) -> tuple[Turn, ...]:
        """Replies of all branches, the oldest first."""

    @property
    @abstractmethod
    def token_ids(self) -> list[int]:
        """Transcript: all tokens of the current conversation."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Length of the transcript, in tokens."""

    @property
    @abstractmethod
    def residence(self) -> Residence:
        """Tokens of the transcript that have KV in the engine's memory, in host memory or higher,
        and on disk or higher. None for a conversation of another tokenizer."""
