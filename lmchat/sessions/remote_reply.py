"""Follows and stops replies that another process generates in a session, by their journal.

The process that holds the lease journals each token before it shows it. A thread here reads the
journal, at most every SHORTEST seconds, and decodes the tokens as that process does. It ends with
the stored turn, or, if the other process dies, with what recovery makes of the journal.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

from lmchat.errors import Error, InternalError, InvalidRequest, NotFound, SessionBusy
from lmchat.generation.choice import Choice
from lmchat.generation.generation import as_error
from lmchat.generation.parts import PartsLog
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.sessions.context import SessionContext
from lmchat.sessions.recovery import INTERRUPTED, has_base, planned
from lmchat.sessions.reply_turn import (
    parser_of,
    reply_of,
    resumed_ids,
    resumed_parts,
    tell_preceding,
    whole,
)
from lmchat.sessions.rewrite import with_turns
from lmchat.store.records import JournalEntry, SessionRecord, TurnStart
from lmchat.store.turns import Timings, Turn, Usage
from turbomind import Event
from turbomind.config.limits import start_thread

SHORTEST, LONGEST = 0.02, 0.1  # seconds between two reads of the journal
READING = 0.1  # largest share of the time that a thread spends with reading
ALIVE = 0.25  # seconds without a token after which the writer is looked for


class RemoteReplies:
    """The replies that other processes generate in one session, while they are followed here."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._current: weakref.ref[RemoteReply] | None = None  # its thread holds it until its end
        self._is_closed = False

    def follow(self, refresh: Callable[[], None]) -> Follower | None:
        """Returns a reader of the reply that another process generates, or None without one.

        Args:
            refresh: refreshes the session.

        Raises:
            NotFound: the session is closed or deleted.
        """
        found = self._found(refresh)
        return None if found is None else found[1]

    def stop(self, refresh: Callable[[], None], turn: int | None) -> Reply | None:
        """Stops the reply that another process generates, and waits for its end.

        Args:
            refresh: refreshes the session.
            turn: only the reply of this turn; None: any.

        Returns:
            The reply; None if there was none to stop.
        """
        try:
            found = self._found(refresh)
        except NotFound:
            return None
        if found is None:
            return None
        reply, follower = found
        with follower:
            if turn not in (None, follower.turn_id):
                return None
            reply.stop()
            with contextlib.suppress(Error):  # it failed before its first token
                return follower.result()
        return None

    def _found(self, refresh: Callable[[], None]) -> tuple[RemoteReply, Follower] | None:
        """Returns the reply that another process generates, with a reader of it."""
        context = self._context
        # Before the refresh, which then has the turn of a reply that ends meanwhile.
        entry = context.runtime.store.unfinished(context.record, living=True)
        refresh()
        if entry is None or entry.start is None or context.writer.is_own(entry):
            return None
        if entry.start.is_stored(context.record.tree):
            return None
        with self._lock:
            if self._is_closed:
                raise NotFound(f"session {context.record.name!r} is closed")
            current = self._running()
            if current is not None and current.fencing_token == entry.fencing_token:
                follower = current.follow()
                if follower is not None:
                    return current, follower
            current = RemoteReply(context, entry, entry.start)
            self._current = weakref.ref(current)
            follower = current.follow()
            assert follower is not None  # its thread has just started
            return current, follower

    def close(self) -> None:
        """Ends the current reply for its readers, and waits for its thread."""
        with self._lock:
            self._is_closed = True
            current = self._running()
        if current is not None:
            current.close()

    def _running(self) -> RemoteReply | None:
        return None if self._current is None else self._current()


class RemoteReply:
    """One reply of another process. A thread reads its journal while it has readers.

    Args:
        context: the session.
        entry: the journal as it is now.
        start: its start.
    """

    def __init__(self, context: SessionContext, entry: JournalEntry, start: TurnStart) -> None:
        self._context = context
        self._runtime = context.runtime
        self._record = record = context.record
        self.fencing_token = entry.fencing_token
        """Fencing token of the reply's lease, which no other reply of the session has."""
        self._start = start
        self._died = self._stopped = False
        self._log = PartsLog()
        self._log.turn_id = start.reply_id
        self._log.metadata = start.new_metadata
        if has_base(record, start):
            tree = with_turns(record, start.past).tree if start.past else record.tree
            tell_preceding(self._log, tree, start.parent, start.user)
        self._resumed = 0  # tokens that a continued reply had before
        self._choice: Choice | None = None  # None: its tokens cannot be decoded here
        if has_base(record, start) and not context.writer.is_unreadable(entry):
            plan = planned(record, start)
            parser = parser_of(self._runtime, record, plan)
            self._resumed = len(resumed_ids(plan))
            self._choice = Choice(0, parser, self._resumed)
            self._log.before = resumed_parts(self._runtime, record, plan, parser)
        self._entries = self._read = 0  # entries and tokens of the journal that have been decoded
        self._lock = threading.Lock()
        self._readers: dict[object, None] = {}
        self._has_ended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmchat-follow", daemon=True)

    def follow(self) -> Follower | None:
        """Returns a reader, or None once the thread has ended."""
        with self._lock:
            if self._has_ended:
                return None
            reader = object()
            readers = self._readers
            readers[reader] = None

            def detached() -> None:  # by a finalizer too: it takes no lock
                readers.pop(reader, None)

            follower = Follower(self._log, detached)
            if self._thread.ident is None:
                try:
                    start_thread(self._thread, "a reply of another process")
                except InternalError:
                    detached()
                    raise
            return follower

    def stop(self) -> None:
        """Asks the other process to stop the reply. Its end comes with the parts.

        Raises:
            NotFound: the session was deleted.
            StoreError: the request cannot be stored.
        """
        self._stopped = True
        self._runtime.store.request_stop(self._record, self.fencing_token)

    def close(self) -> None:
        """Ends the reading, and waits for the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            pause, last = SHORTEST, time.monotonic()
            while not self._is_left():
                begun = time.monotonic()
                store = self._runtime.store
                entry = store.unfinished(self._record, living=True, skip=self._entries)
                if entry is None or entry.fencing_token != self.fencing_token:
                    return self._end()
                if self._take(entry):
                    pause, last = SHORTEST, begun
                else:
                    pause = min(LONGEST, 1.5 * pause)
                    if begun - last > ALIVE:
                        self._recover()
                        last = begun
                spent = time.monotonic() - begun
                self._closing.wait(max(pause, spent * (1 / READING - 1)))
        except Exception as error:
            with self._lock:
                self._has_ended = True
            self._log.end(None, as_error(error))

    def _is_left(self) -> bool:
        """Returns whether the reading ends, for lack of readers or because the session closed."""
        if self._closing.is_set():
            raise NotFound(f"session {self._record.name!r} is closed")
        with self._lock:
            self._has_ended = not self._readers
            return self._has_ended

    def _take(self, entry: JournalEntry) -> bool:
        """Decodes new tokens of the journal. Returns whether there were any."""
        new = entry.token_ids
        self._entries = entry.entries
        self._read += len(new)
        self._decode(new)
        return bool(new)

    def _decode(self, ids: tuple[int, ...]) -> None:
        if ids and self._choice is not None and not self._choice.parser.stopped:
            parts = self._choice.take(Event(token_ids=ids))
            if parts:
                self._log.append(parts)

    def _recover(self) -> None:
        """Recovers the reply if its process has died."""
        left = self._runtime.store.unfinished(self._record)
        if left is None:  # it lives
            return
        if self._context.writer.is_unreadable(left):
            raise InvalidRequest(
                f"session {self._record.name!r} has an unfinished reply of another model, expected "
                "to be opened with that model first"
            )
        self._died = True
        with contextlib.suppress(SessionBusy):  # another process recovers it
            self._runtime.reader.call(self._context.writer.follow)

    def _end(self) -> None:
        """Ends with the stored turn."""
        with contextlib.suppress(Error):  # the session then finds the turn with its next method
            self._runtime.reader.call(self._context.writer.follow)
        record = self._runtime.store.refresh(self._record)
        turn = self._stored(record)
        reply = self._unstored(record) if turn is None else reply_of(turn)
        if turn is not None:
            self._decode(turn.token_ids[self._resumed + self._read :])
        self._finish(reply)
        with self._lock:
            self._has_ended = True
        self._log.end(reply, None)

    def _finish(self, reply: Reply) -> None:
        """Shows what was held back, or all of a reply whose tokens cannot be decoded here."""
        choice = self._choice
        if choice is not None:
            parts = choice.finish(reply.finish_reason, 0.0)
        else:
            parts = list(whole(reply.text, reply.reasoning, tuple(reply.token_ids)))
        if parts:
            self._log.append(parts)

    def _stored(self, record: SessionRecord) -> Turn | None:
        if not self._start.is_stored(record.tree):
            return None
        turn = record.tree.get(self._start.reply_id)
        ours = self._start.settings
        same = all(turn.settings.get(name) == ours.get(name) for name in ("seed", "attempt"))
        return turn if same else None  # another reply has got the number

    def _unstored(self, record: SessionRecord) -> Reply:
        """Returns the reply of a turn that ended before its first token.

        Raises:
            InternalError: it failed.
        """
        start = self._start
        is_kept = start.user is None or start.user.text == record.unanswered
        if not is_kept and not self._stopped:
            raise InternalError("the reply failed before its first token, in another process")
        extends = None if start.extends is None else record.tree.get(start.extends)
        reason = INTERRUPTED if self._died else "cancelled"
        if extends is not None:
            return replace(reply_of(extends), finish_reason=reason, usage=Usage())
        return Reply("", "", [], reason, Usage(), Timings())


def stored_reply(turn: Turn) -> Follower:
    """Returns a reader of a stored reply, which is complete."""
    log = PartsLog()
    log.turn_id = turn.id
    log.append(whole(turn.text, turn.reasoning, turn.token_ids))
    log.end(reply_of(turn), None)
    return Follower(log)
