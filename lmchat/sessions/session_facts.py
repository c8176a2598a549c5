"""What a session is: its properties, read from its record in memory."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from lmchat.generation.state import State
from lmchat.sessions.context import SessionContext
from lmchat.sessions.recovery import INTERRUPTED
from lmchat.sessions.rewrite import system_of
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn


class SessionFacts:
    """The properties of a session.

    Args:
        context: what the parts of the session share.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context, self._runtime = context, context.runtime
        self._activity, self._writer, self._lock = context.activity, context.writer, context.lock

    @property
    def _record(self) -> SessionRecord:
        return self._context.record

    @property
    def name(self) -> str:
        """Name, unique among the sessions of its owner."""
        return self._record.name

    @property
    def owner(self) -> str:
        """Owner of the session. Pages are shared only within an owner."""
        return self._record.owner

    @property
    def created(self) -> datetime:
        """Time of creation, in UTC; templates see it as the date."""
        return self._record.created

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags, in the order given."""
        return self._record.tags

    @property
    def id(self) -> str:
        """Id of the session, 32 hexadecimal digits. It never changes and is never used again."""
        return self._record.id

    @property
    def revision(self) -> int:
        """Number that rises with every stored change of the session, by any process. `refresh()`
        reads those of others."""
        return self._record.revision

    @property
    def metadata(self) -> dict[str, str]:
        """A copy of the metadata: texts by key, for the programs that use the session."""
        return dict(self._record.metadata)

    @property
    def overflow(self) -> str:
        """Policy for a turn that does not fit the context: "refuse" or "drop"."""
        return self._record.overflow

    @property
    def interrupted(self) -> bool:
        """Whether the process ended during the last reply. `continue_()` extends it."""
        record = self._record
        return record.leaf is not None and record.tree.get(record.leaf).finish_reason == INTERRUPTED

    @property
    def unanswered(self) -> str | None:
        """Text of a turn that was stopped, or whose process ended, before the first token of its
        reply, else None. It is not in the conversation and can be sent again. The next turn clears
        it."""
        return self._record.unanswered or None

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices that the next reply will start with, such as damage found when the session was
        opened."""
        return self._record.notices

    @property
    def state(self) -> State:
        """Current activity."""
        return self._activity.state

    @property
    def history(self) -> str:
        """The rule for earlier turns: "append" or "template"."""
        return self._record.history

    @property
    def pinned(self) -> bool:
        """Whether its pages are retained longer than those of other sessions."""
        return self._record.pinned

    @property
    def settings(self) -> dict[str, Any]:
        """A copy of the session's own generation settings."""
        return dict(self._record.settings)

    @property
    def template_variables(self) -> dict[str, Any]:
        """A copy of the variables that the template gets beside the messages."""
        return dict(self._record.template_variables)

    @property
    def system(self) -> str | None:
        """System prompt, or None."""
        return system_of(self.turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns of the current conversation: the system prompt, if any, then users and replies."""
        record = self._record
        return tuple(record.tree.path(record.leaf))

    @property
    def token_ids(self) -> list[int]:
        """Transcript: all tokens of the current conversation."""
        record = self._record
        return record.tree.token_ids(record.leaf)

    @property
    def length(self) -> int:
        """Length of the transcript, in tokens."""
        record = self._record
        return 0 if record.leaf is None else record.tree.place(record.leaf).length
