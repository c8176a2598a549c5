"""What a session is, what can be set of it, and how a change is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from typing_extensions import Unpack

from lmchat.forks import watch
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.sessions.context import SessionContext
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.recovery import INTERRUPTED
from lmchat.sessions.rewrite import system_of
from lmchat.sessions.session_writer import Change
from lmchat.store.protocol import check_mapping, check_metadata, check_tags, check_text
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn
from lmchat.text.prompt import check_history
from turbomind.params import wrong

MAX_TITLE = 10_000  # characters, as in archives

Result = TypeVar("Result")


class SessionFacts:
    """The properties of a session.

    Args:
        context: what the parts of the session share.
    """

    def __init__(self, context: SessionContext) -> None:
        watch(self)
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
    def dropped(self) -> tuple[Turn, ...]:
        """Users and replies before `turns` that were dropped from the prompt because the context
        was full (`set_overflow("drop")`), the oldest first. Readers see them above the others."""
        record = self._record
        return tuple(record.tree.dropped(record.tree.path(record.leaf)))

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

    @property
    def _is_foreign(self) -> bool:
        """Whether the conversation is that of a model with another tokenizer. Its next turn encodes
        it again; until then nothing of it can have KV here."""
        record, runtime = self._record, self._runtime
        if record.tokenizer not in ("", runtime.identity.tokenizer):
            return True
        return max(record.tree.token_ids(record.leaf), default=0) >= runtime.core.vocab_size


class SessionSettings(SessionFacts):
    """Properties of a session that can be set. Each change is stored when the method returns."""

    @property
    def title(self) -> str:
        """Title: the one that was set, else the start of the first user message. Setting an empty
        text restores the latter."""
        return self._record.title

    @title.setter
    def title(self, title: str) -> None:
        self.set_title(title)

    def set(self, /, **settings: Unpack[GenerationSettings]) -> None:
        """Changes the session's generation settings; None restores the model's.

        Raises:
            InvalidRequest: a value is out of range, or no reply could use it.
        """

        def change() -> Change[None]:
            chosen = self._runtime.session_settings(settings, self._record.settings)
            return Change(None, {"settings": chosen})

        self._change(change)

    def set_variables(self, /, **variables: Any) -> None:
        """Changes template variables such as `enable_thinking`; None removes one."""

        def change() -> Change[None]:
            merged = {**self._record.template_variables, **variables}
            chosen = {name: value for name, value in merged.items() if value is not None}
            return Change(None, {"template_variables": chosen})

        self._change(change)

    def set_history(self, history: str) -> None:
        """Changes the rule for earlier turns, "append" or "template", from the next turn on."""
        self._set("history", check_history(history))

    def update(
        self,
        *,
        title: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        history: str | None = None,
        overflow: str | None = None,
        check: Callable[[int], None] | None = None,
    ) -> None:
        """Changes what is given in one transaction, or nothing.

        Args:
            title: as in `set_title()`.
            tags: as in `set_tags()`.
            metadata: as in `set_metadata()`.
            settings: as in `set()`.
            template_variables: as in `set_variables()`.
            history: as in `set_history()`.
            overflow: as in `set_overflow()`.
            check: called with the session's revision before the change, which it may refuse by an
                error. None: nothing is checked.

        Raises:
            InvalidRequest: a value is out of range.
        """
        fields: dict[str, object] = {
            "own_title": None if title is None else _title(title),
            "tags": None if tags is None else check_tags(tags),
            "metadata": None if metadata is None else check_metadata(metadata),
            "history": None if history is None else check_history(history),
            "overflow": None if overflow is None else check_overflow(overflow),
        }
        own = check_mapping("settings", settings)
        variables = check_mapping("template_variables", template_variables)

        def change() -> Change[None]:
            record = self._record
            if check is not None:
                check(record.revision)
            found = {name: value for name, value in fields.items() if value is not None}
            if own:
                found["settings"] = self._runtime.session_settings(own, record.settings)
            if variables:
                all_of_them = {**record.template_variables, **variables}
                found["template_variables"] = {
                    k: v for k, v in all_of_them.items() if v is not None
                }
            return Change(None, found)

        self._change(change)

    def set_title(self, title: str) -> None:
        """Sets the title; an empty text restores the start of the first user message."""
        self._set("own_title", _title(title))

    def set_tags(self, tags: Iterable[str]) -> None:
        """Replaces the tags."""
        self._set("tags", check_tags(tags))

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Replaces the metadata: at most 16 keys of 1 to 64 characters, and values of at most 512.

        Raises:
            InvalidRequest: the metadata is not of this form.
        """
        self._set("metadata", check_metadata(metadata))

    def set_overflow(self, overflow: str) -> None:
        """Sets what happens if a turn does not fit the context.

        "refuse" raises ContextFull. "drop" removes the oldest turns, down to half the context, and
        adds a notice to the reply.
        """
        self._set("overflow", check_overflow(overflow))

    def _change(self, act: Callable[[], Change[Result]], verb: str | None = None) -> Result:
        """Calls `SessionWriter.change()`. With `verb`, requires that nothing is being generated and
        that the conversation has not moved on."""
        if verb is not None:
            self._activity.settle()

        def check() -> None:
            self._activity.check_open() if verb is None else self._activity.check_idle(verb)

        def checked() -> Change[Result]:
            check()
            return act()

        with self._lock:
            check()
        return self._runtime.worker.call(
            lambda: self._writer.change(checked, placed=verb is not None)
        )

    def _set(self, name: str, value: object) -> None:
        self._change(lambda: Change(None, {name: value}))


def _title(given: str) -> str:
    """Returns a title in one line.

    Raises:
        InvalidRequest: it is not a string, or too long.
    """
    check_text("title", given)
    if len(given) > MAX_TITLE:
        raise wrong("title", given, f"at most {MAX_TITLE}", seen=f"{len(given)} characters")
    return " ".join(given.split())
