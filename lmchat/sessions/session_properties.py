"""What a session of this process is, what can be set of it, and how a change is stored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from typing_extensions import override

from lmchat.errors import NotFound
from lmchat.forks import watch
from lmchat.generation.state import State
from lmchat.interface.session import SessionApi
from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION
from lmchat.sessions.context import SessionContext
from lmchat.sessions.generation_starter import REPLANS, overtaken
from lmchat.sessions.overflow import check_overflow
from lmchat.sessions.recovery import INTERRUPTED
from lmchat.sessions.rewrite import rebuilt, rounds_of
from lmchat.sessions.session_writer import Change, Moved
from lmchat.store.protocol import check_mapping, check_metadata, check_tags, check_text
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn
from lmchat.text.prompt import check_history
from turbomind.params import wrong

MAX_TITLE = 10_000  # characters, as in archives

Result = TypeVar("Result")

Planned = tuple[list[Turn], dict[str, Any]]
"""Turns that are added to a session, and fields that change with them."""


class SessionProperties(SessionApi):
    """The properties of a session.

    Args:
        context: what the parts of the session share.
    """

    def __init__(self, context: SessionContext) -> None:
        super().__init__()
        watch(self)
        self._context, self._runtime = context, context.runtime
        self._activity, self._writer, self._lock = context.activity, context.writer, context.lock
        self._handles = context.handles

    @property
    def _record(self) -> SessionRecord:
        return self._context.record

    @property
    @override
    def name(self) -> str:
        return self._record.name

    @property
    @override
    def owner(self) -> str:
        return self._record.owner

    @property
    @override
    def created(self) -> datetime:
        return self._record.created

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return self._record.tags

    @property
    @override
    def id(self) -> str:
        return self._record.id

    @property
    @override
    def revision(self) -> int:
        return self._record.revision

    @property
    @override
    def metadata(self) -> dict[str, str]:
        return dict(self._record.metadata)

    @property
    @override
    def overflow(self) -> str:
        return self._record.overflow

    @property
    @override
    def interrupted(self) -> bool:
        record = self._record
        return record.leaf is not None and record.tree.get(record.leaf).finish_reason == INTERRUPTED

    @property
    @override
    def unanswered(self) -> str | None:
        return self._record.unanswered or None

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        return self._record.notices

    @property
    @override
    def state(self) -> State:
        return self._activity.state

    @property
    @override
    def history(self) -> str:
        return self._record.history

    @property
    @override
    def pinned(self) -> bool:
        return self._record.pinned

    @property
    @override
    def settings(self) -> dict[str, Any]:
        return dict(self._record.settings)

    @property
    @override
    def template_variables(self) -> dict[str, Any]:
        return dict(self._record.template_variables)

    @property
    @override
    def turns(self) -> tuple[Turn, ...]:
        record = self._record
        return tuple(record.tree.path(record.leaf))

    @property
    @override
    def dropped(self) -> tuple[Turn, ...]:
        record = self._record
        return tuple(record.tree.dropped(record.tree.path(record.leaf)))

    @property
    @override
    def token_ids(self) -> list[int]:
        record = self._record
        return record.tree.token_ids(record.leaf)

    @property
    @override
    def length(self) -> int:
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

    @override
    def _shown_title(self) -> str:
        return self._record.title

    @override
    def _update(
        self, changes: Mapping[str, Any], check: Callable[[int], None] | None = None
    ) -> None:
        """Does what `update()` does. `check` is called with the session's revision before the
        change, which it may refuse by an error."""
        given = {name: _CHECKS[name](value) for name, value in changes.items()}
        fields = {_FIELDS.get(name, name): value for name, value in given.items()}
        merged = {name: fields.pop(name) for name in _MERGES if name in fields}
        system = fields.pop("system", None)

        def now() -> dict[str, Any]:
            if check is not None:
                check(self._record.revision)
            return fields | {name: _MERGES[name](self, added) for name, added in merged.items()}

        if system is None:
            self._change(lambda: Change(None, now()))
        else:
            self._runtime.check_fits(system)
            self._replan(
                "change the system prompt", lambda record: self._rebuilt(record, system), now
            )
        if "pinned" in fields:
            self._retain(fields["pinned"])

    def _rebuilt(self, record: SessionRecord, system: str) -> Planned:
        """Returns the conversation with another system prompt."""
        rounds = rounds_of(record.tree.path(record.leaf))
        made = rebuilt(self._runtime, record, system or None, rounds)
        return made, {"leaf": made[-1].id if made else None}

    def _merged_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._runtime.session_settings(given, self._record.settings)

    def _merged_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**self._record.template_variables, **given}
        return {name: value for name, value in merged.items() if value is not None}

    def _retain(self, pinned: bool) -> None:
        with self._lock:
            newest = self._handles.set_retention_priority(
                RETENTION_PINNED if pinned else RETENTION_SESSION
            )
        if newest is not None:  # without the lock, because the engine may take a step to answer
            with contextlib.suppress(NotFound):
                newest.set_retention_priority(self._handles.retention_priority)

    # --- storing changes -------------------------------------------------------------------------

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

    def _replan(
        self,
        what: str,
        plan: Callable[[SessionRecord], Planned | None],
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Adds turns and changes fields as planned, and plans again if another process was
        faster. A plan of None is that nothing is left to do. `more` returns further fields, from
        the record as it is then."""
        self._activity.settle()
        for _ in range(REPLANS):
            with self._lock:
                self._activity.check_idle(what)
                seen, record = self._writer.seen, self._record
            planned = plan(record)
            if planned is None:
                return
            with contextlib.suppress(Moved):
                self._change(functools.partial(self._move, planned, more, seen), what)
                return
        raise overtaken(self._record)

    def _move(
        self, planned: Planned, more: Callable[[], dict[str, Any]], seen: int
    ) -> Change[None]:
        """Adds turns and changes fields, unless the conversation has moved on since."""
        if self._writer.seen != seen:
            raise Moved
        made, fields = planned
        return Change(None, {**fields, **more()}, made)


def _title(given: str) -> str:
    """Returns a title in one line.

    Raises:
        InvalidRequest: it is not a string, or too long.
    """
    check_text("title", given)
    if len(given) > MAX_TITLE:
        raise wrong("title", given, f"at most {MAX_TITLE}", seen=f"{len(given)} characters")
    return " ".join(given.split())


def _system(given: str) -> str:
    check_text("system", given)
    return given


def _pinned(given: bool) -> bool:
    if not isinstance(given, bool):
        raise wrong("pinned", given, "True or False")
    return given


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "title": _title,
    "tags": check_tags,
    "metadata": check_metadata,
    "settings": lambda given: check_mapping("settings", given),
    "template_variables": lambda given: check_mapping("template_variables", given),
    "history": check_history,
    "overflow": check_overflow,
    "system": _system,
    "pinned": _pinned,
}
"""Property that can be set -> what checks a value of it and returns the one that is stored."""

_FIELDS = {"title": "own_title"}
"""Property -> its field of the record, where that has another name."""

_MERGES: dict[str, Callable[[SessionProperties, Mapping[str, Any]], dict[str, Any]]] = {
    "settings": SessionProperties._merged_settings,
    "template_variables": SessionProperties._merged_variables,
}
"""Property whose new values are added to the old ones -> what adds them."""
