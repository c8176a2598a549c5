"""Writes one session: its record is replaced once the store has committed the next one.

Threads that write one session wait for each other. None of them is a reader thread, and none the
main thread, which Ctrl-C interrupts (`lmchat.generation.worker`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from lmchat.errors import Error, InvalidRequest, SessionBusy, StoreError
from lmchat.sessions.model_identity import TOKENIZER
from lmchat.sessions.recovery import Recovered, recovered
from lmchat.sessions.runtime import Runtime
from lmchat.store.protocol import Stale
from lmchat.store.records import JournalEntry, Lease, SessionRecord, TurnStart
from lmchat.store.syncer import as_store_error, taken_over
from lmchat.store.turns import Turn

Result = TypeVar("Result")


P = ParamSpec("P")


def _one_at_a_time(
    method: Callable[Concatenate[SessionWriter, P], Result],
) -> Callable[Concatenate[SessionWriter, P], Result]:
    @functools.wraps(method)
    def call(self: SessionWriter, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        with self._writing:
            return method(self, *args, **kwargs)

    return call


class Moved(Exception):
    """The conversation has changed since a change of it was computed."""


@dataclass(frozen=True)
class Change(Generic[Result]):
    """The changes of a session that a verb makes.

    Attributes:
        result: what the verb returns.
        fields: new values of fields of the record, by name.
        turns: turns that are new or replace those of their ids, parents first.
    """

    result: Result
    fields: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[Turn] = ()


class SessionWriter:
    """Writes one session, and is the only place where its record is replaced.

    Args:
        runtime: the model, the engine and the store.
        record: the session, as the store returned it.
        lock: the session's lock. The record stays the same while a caller holds it.
    """

    def __init__(
        self, runtime: Runtime, record: SessionRecord, lock: AbstractContextManager[Any]
    ) -> None:
        self.seen = 0
        """Number of changes of the conversation; a plan made at a lower number is obsolete."""
        self._runtime = runtime
        self._store = runtime.store
        self._record = self._stored = record  # they differ only by what the store could not take
        self._lock = lock
        self._writing = threading.RLock()  # held during calls of the store; `lock` is not
        self._unsaved: dict[int, Turn] = {}  # turns that the store could not take when they ended
        self._is_dirty = False  # the record is only in memory and its last turn in the journal
        self._lease: Lease | None = None  # the last one of this process
        self._holding = False
        self.is_deleted = False
        """Returns whether this process has deleted the session."""
        self.has_moved = False
        """Whether another process had the lease before the current one."""

    @property
    def record(self) -> SessionRecord:
        """The session as it is now."""
        return self._record

    @property
    def is_empty(self) -> bool:
        """Returns whether the session has no turn and no setting, not even a name."""
        record = self._record
        nothing = not len(record.tree) and not record.settings and not record.template_variables
        chosen = record.pinned or record.own_title or record.tags or record.metadata
        chosen = chosen or record.unanswered
        return nothing and not chosen and re.fullmatch(r"chat-\d+", record.name) is not None

    @property
    def is_unsettled(self) -> bool:
        """Returns whether a turn is only in memory and in the journal."""
        return self._is_dirty

    @_one_at_a_time
    def follow(self) -> None:
        """Reads changes of other processes and recovers the reply of a process that died.

        It needs not write: turns that the store cannot take now stay in memory, and those of a dead
        process in its journal.

        Raises:
            NotFound, SessionBusy, StoreError.
        """
        with contextlib.suppress(StoreError):
            self._save()
        if self._is_dirty:
            return
        record = self._store.refresh(self._stored)
        self.seen += record is not self._stored
        self._committed(record)
        self._recover()

    def _recover(self) -> None:
        entry = self._store.unfinished(self._record)
        if entry is None:
            return
        if self.is_unreadable(entry):
            return
        found = recovered(self._runtime, self._record, entry)
        try:
            lease = self._store.recover(self._record)
        except SessionBusy:  # another process recovers it
            return
        except StoreError:  # it is read, and recovered when the store can be written
            self._replace(_with_recovered(self._record, found))
            return
        self._lease, self._holding = lease, True
        if found != Recovered():
            self._finish_recovery(lease, found)
        self.release()

    def is_own(self, entry: JournalEntry) -> bool:
        """Returns whether the journal is that of the last turn of this process."""
        return self._lease is not None and self._lease.fencing_token == entry.fencing_token

    def is_unreadable(self, entry: JournalEntry) -> bool:
        """Returns whether its tokens come from another tokenizer."""
        ours = self._runtime.identity.tokenizer
        made_by = entry.start.settings.get(TOKENIZER, ours) if entry.start else ours
        return bool(entry.token_ids) and made_by != ours

    def _finish_recovery(self, lease: Lease, found: Recovered) -> None:
        record = _with_recovered(self._record, found)
        try:
            self._committed(self._store.finish(lease, record, found.turns))
        except Stale:  # another process has recovered it
            self._committed(self._store.refresh(self._stored))
        except Exception:  # it stays in the journal until the next change persists it
            self._uncommitted(record, found.turns)
        self.seen += 1

    @_one_at_a_time
    def change(self, act: Callable[[], Change[Result]], *, placed: bool = False) -> Result:
        """Persists a change in one transaction, or leaves the session as it was.

        Args:
            act: computes the change from the record, under the lock. It is called again when
                another process was faster.
            placed: the change is meant for the current end of the conversation, and is refused
                when another process has moved that.

        Returns:
            The change's result.

        Raises:
            SessionBusy: another process generates, or was faster twice.
            NotFound: the session was deleted.
            StoreError: the store cannot write.
        """
        self.follow()
        leaf = self._record.leaf
        try:
            return self._change(act)
        except Stale:
            self.follow()
            if placed and leaf != self._record.leaf:
                raise self._overtaken() from None
            try:
                return self._change(act)
            except Stale:
                raise self._overtaken() from None

    def _change(self, act: Callable[[], Change[Result]]) -> Result:
        leaf = self._record.leaf
        with self._lock:
            change = act()
        record = self._record.changed(change.turns, **change.fields)
        self._committed(self._store.change(record, [*self._unsaved.values(), *change.turns]))
        self.seen += leaf != self._record.leaf
        return change.result

    @_one_at_a_time
    def rename(self, name: str) -> None:
        """Gives the session another name. Raises InvalidRequest when it is taken, NotFound."""
        self._stored = self._store.rename(self._stored, name)
        self._replace(replace(self._record, name=name, revision=self._stored.revision))

    def _overtaken(self) -> SessionBusy:
        return SessionBusy(
            f"session {self._record.name!r} is being changed by another process, which was faster: "
            "nothing was done; try again"
        )

    # --- one turn ------------------------------------------------------------------------------

    @_one_at_a_time
    def begin(self, start: TurnStart, seen: int, request: str = "") -> Lease:
        """Takes the lease and persists the start of a turn whose plan was made at `seen`, which
        answers a client's request with this digest; empty: it answers none.

        Raises:
            Stale: the session has changed since; call `follow()` and plan again.
        """
        self._save()
        if self.seen != seen:
            raise Stale
        left = self._store.unfinished(self._record)
        if left is not None and self.is_unreadable(left):
            raise InvalidRequest(
                f"session {self._record.name!r} has an unfinished reply of another model, expected "
                f"to be opened with {self._record.model or 'that'} first, or forked"
            )
        if left is not None:
            raise Stale  # a process died and left it
        lease = self._store.begin(self._record, start, request)
        last = self._lease
        before = 0 if last is None else last.fencing_token
        self.has_moved = lease.fencing_token != before + 1
        if self.has_moved:
            self._runtime.pages.refresh()  # another process has written turns and pages
        self._lease, self._holding = lease, True
        return lease

    @_one_at_a_time
    def finish(self, turns: Sequence[Turn], fields: Mapping[str, Any]) -> Error | None:
        """Persists the end of a turn.

        Args:
            turns: turns that are new or replace those of their ids, parents first; the last one is
                the reply. Empty: the turn ended before its first token.
            fields: new values of fields of the record, by name.

        Returns:
            An error if the store failed. The reply is in the record with that error then, and the
            next change persists it. Without turns, the record stays as it was.
        """
        self.seen += 1
        record = self._record.changed(turns, **fields)
        if self.is_deleted:
            self._replace(record)
            return None
        pending = list({**self._unsaved, **{turn.id: turn for turn in turns}}.values())
        error: Error
        try:
            if self._lease is not None and self._holding:
                self._committed(self._store.finish(self._lease, record, pending))
            else:  # the turn was stopped before it began
                self._committed(self._store.change(record, pending))
        except Stale as stale:
            error = taken_over(stale)
        except Exception as failure:
            error = as_store_error(failure)
        else:
            return None
        if not turns:
            return error
        reply = replace(turns[-1], finish_reason="error", error=error)
        self._uncommitted(record.changed([reply]), [*pending, reply])
        return error

    @_one_at_a_time
    def release(self) -> None:
        """Releases the lease after a turn, unless a reply is only in memory and in the journal."""
        if self._lease is not None and self._holding and not self._is_dirty:
            self._holding = False
            self._runtime.durability.ended(self._lease)

    @_one_at_a_time
    def deleted(self) -> None:
        """Notes that the session was deleted; nothing more of it is persisted."""
        self.is_deleted = True
        self._unsaved, self._is_dirty = {}, False
        self._holding = False

    @_one_at_a_time
    def settle(self) -> None:
        """Persists what an earlier attempt could not, and releases the lease."""
        self._save()
        self.release()

    def _save(self) -> None:
        """Persists turns that the store could not take before."""
        if not self._is_dirty:
            return
        try:
            self._committed(self._store.change(self._record, list(self._unsaved.values())))
        except Stale:
            self._replant()
        self.release()

    def _replant(self) -> None:
        """Adds the unsaved turns as a branch, since other processes have continued without them."""
        self._stored = record = self._store.refresh(self._stored)
        ids: dict[int | None, int] = {}
        turns: list[Turn] = []
        for turn in self._unsaved.values():
            ids[turn.id] = record.tree.new_id()
            parent = ids.get(turn.parent, turn.parent)
            turns.append(replace(turn, id=ids[turn.id], parent=parent))
        record = record.changed(turns)
        self._uncommitted(record, turns)
        self.seen += 1
        self._committed(self._store.change(record, turns))

    # --- in memory ------------------------------------------------------------------------------

    def _committed(self, record: SessionRecord) -> None:
        """Replaces the record by one that the store has returned."""
        self._stored, self._unsaved, self._is_dirty = record, {}, False
        self._replace(record)

    def _uncommitted(self, record: SessionRecord, turns: Sequence[Turn]) -> None:
        """Replaces the record by one whose last turns the store could not take."""
        self._unsaved, self._is_dirty = {turn.id: turn for turn in turns}, True
        self._replace(record)

    def _replace(self, record: SessionRecord) -> None:
        with self._lock:
            self._record = record


def _with_recovered(record: SessionRecord, found: Recovered) -> SessionRecord:
    """Returns the record with what a journal has yielded."""
    fields: dict[str, Any] = {}
    if found.turns:
        fields["leaf"] = found.leaf
    if found.turns or found.unanswered.text:
        fields |= found.unanswered.unanswered
    if found.notice:
        fields["notices"] = (*record.notices, found.notice)
    return record.changed(found.turns, **fields)
