"""The open sessions of a `ChatEngine`.

A session stays open while a caller holds it. The registry itself holds the sessions used last, so
that their KV handles stay; a session that neither holds is closed. So no caller is ever given a
session that closes under it, and a server does not hold every session that it ever opened.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from lmchat.errors import EngineClosed, Error, InvalidRequest, NotFound, SessionBusy, StoreError
from lmchat.generation.state import State
from lmchat.kv.handle_cache import HandleCache
from lmchat.kv.page_deletion import free_pages, unfinished
from lmchat.sessions.context import SessionContext
from lmchat.sessions.planner import unanswered_prompt
from lmchat.sessions.runtime import Runtime
from lmchat.sessions.session import Session
from lmchat.store.prefixes import Transcript, ends
from lmchat.store.records import SessionRecord
from turbomind.params import wrong
from turbomind.shown import shown

IDLE_CLOSE = 600.0
"""Seconds without use after which a session that no caller holds is closed."""

MAX_OPEN = 64
"""Sessions without a caller that stay open."""

_ATTEMPTS = 5  # to open a session while others rename and delete it


class SessionRegistry:
    """All methods are for any thread. The lock guards the tables; no store is read under it.

    Args:
        runtime: what the sessions share.
        idle_close: see IDLE_CLOSE; None: no limit.
        max_open: see MAX_OPEN.
    """

    def __init__(
        self, runtime: Runtime, idle_close: float | None = IDLE_CLOSE, max_open: int = MAX_OPEN
    ) -> None:
        self._runtime = runtime
        self._idle_close = idle_close
        self._max_open = max_open
        self._lock = threading.Lock()
        self._sessions: dict[str, weakref.ref[Session]] = {}  # all that are open, by id
        self._names: dict[tuple[str, str], str] = {}  # ids, by owner and the last known name
        self._keys: dict[str, tuple[str, str]] = {}  # the same the other way round
        self._recent: OrderedDict[str, tuple[Session, float]] = OrderedDict()  # the last used last
        self._unsettled: dict[str, SessionContext] = {}  # closed while the store failed to write
        self._is_closed = False

    # --- opening -----------------------------------------------------------------------------

    def find_or_add(self, record: SessionRecord) -> tuple[Session, bool]:
        """Returns the session of the record's name, and whether it was added."""
        found = self.find(record.owner, record.name) if record.name else None
        if found is not None:
            return found, False
        try:
            return self.add(record), True
        except InvalidRequest:  # another thread or process may have been faster
            found = self.find(record.owner, record.name) if record.name else None
            if found is None:
                raise
            return found, False

    def find(self, owner: str, name: str) -> Session | None:
        """Returns the session of that name in its current state, or None. Other processes may have
        created, renamed or deleted it since it was opened here."""
        with self._lock:
            self._check_open()
            known = self._known(self._names.get((owner, name), ""))
        if known is not None and self._followed(known) and known.name == name:
            return known
        return self._opened(lambda: self._runtime.store.find(owner, name), name)

    def find_by_id(self, owner: str, session_id: str) -> Session | None:
        """Returns the owner's session of that id in its current state, or None."""
        with self._lock:
            self._check_open()
            known = self._known(session_id)
        if known is not None and known.owner == owner and self._followed(known):
            return known
        return self._opened(lambda: self._runtime.store.find_by_id(owner, session_id), session_id)

    def _opened(self, read: Callable[[], SessionRecord | None], what: str) -> Session | None:
        for _ in range(_ATTEMPTS):
            record = read()
            if record is None:
                return None
            if self._settled(record.id):
                continue  # read what was written
            session = self._adopt(record)
            if self._followed(session):
                return session
        raise SessionBusy(f"session {shown(what)} is being changed by others: try again")

    def _settled(self, session_id: str) -> bool:
        """Writes what a closed session could not write; else its next turn would empty its journal.
        Returns whether there was anything."""
        with self._lock:
            context = self._unsettled.get(session_id)
        if context is None:
            return False
        context.writer.settle()
        with self._lock:
            self._unsettled.pop(session_id, None)
        return True

    def _adopt(self, record: SessionRecord) -> Session:
        """Returns the open session of the record, or opens it."""
        with self._lock:
            self._check_open()
            found = self._known(record.id)
            if found is not None and found.state is not State.CLOSED:
                return found
            return self._register(Session(self._runtime, record, self))

    def _followed(self, session: Session) -> bool:
        """Reads what others have changed. Returns False if the session is closed or deleted."""
        try:
            session._writer.follow()
        except NotFound:
            return False
        with self._lock:
            if session.state is State.CLOSED:
                return False
            self._name(session)
        self.used(session)
        return True

    def add(self, record: SessionRecord, handles: HandleCache | None = None) -> Session:
        """Stores a new session and opens it."""
        with self._lock:
            self._check_open()
        store = self._runtime.store
        record = store.add(record) if record.name else store.add_numbered(record)
        session = Session(self._runtime, record, self, handles)
        with self._lock:
            known = self._known(record.id)  # another thread may have found it in the store
            if known is not None and known.state is not State.CLOSED:
                session, unused = known, session
            else:
                unused = None
                self._register(session)
        if unused is not None:
            unused._context.close()
        session.fresh = True
        self.used(session)
        return session

    def _register(self, session: Session) -> Session:
        close = functools.partial(self._close_dropped, session._context)
        self._sessions[session.id] = weakref.ref(session, self._runtime.worker.poster(close))
        self._name(session)
        return session

    def _known(self, session_id: str) -> Session | None:
        found = self._sessions.get(session_id)
        return None if found is None else found()

    def _name(self, session: Session) -> None:
        self._forget_name(session.id)
        key = self._keys[session.id] = (session.owner, session.name)
        self._names[key] = session.id

    def _forget_name(self, session_id: str) -> None:
        key = self._keys.pop(session_id, None)
        if key is not None and self._names.get(key) == session_id:
            del self._names[key]

    def opened(self, record: SessionRecord, handles: HandleCache) -> Session:
        """Stores and opens a fork. Used by `Session.fork()`."""
        try:
            return self._runtime.worker.call(lambda: self.add(record, handles))
        except Exception:
            handles.close()
            raise

    def renamed(self, session: Session, name: str) -> None:
        """Gives a session another name. Used by `Session.rename()`."""
        session._writer.rename(name)
        with self._lock:
            self._name(session)

    # --- closing -----------------------------------------------------------------------------

    def used(self, session: Session) -> None:
        """Records the use of a session, and closes others that are not used."""
        with self._lock:
            if self._known(session.id) is not session:
                return
            self._recent[session.id] = session, time.monotonic()
            self._recent.move_to_end(session.id)
        if len(self._recent) > self._max_open:
            self.sweep()

    def sweep(self) -> None:
        """Lets go of sessions that are not used. Those that no caller holds are closed then."""
        now, unused = time.monotonic(), []
        with self._lock:
            found = [(i, used) for i, (s, used) in self._recent.items() if not _must_stay(s)]
            for number, (session_id, used) in enumerate(found):
                is_old = self._idle_close is not None and now - used >= self._idle_close
                if is_old or number < len(found) - self._max_open:
                    unused.append(self._recent.pop(session_id))
        del unused  # without the lock: this may call finalizers

    def _close_dropped(self, context: SessionContext) -> None:
        """Closes what a session that no caller holds has left."""
        if context.close():
            with contextlib.suppress(Error):  # the turn stays in the journal
                context.writer.settle()
            self._forget_closed(context)

    def closed(self, session: Session) -> None:
        """Records that a session has closed. Used by `Session.close()`."""
        with self._lock:
            if self._known(session.id) is session:
                del self._sessions[session.id]
            held = self._recent.get(session.id)
            if held is not None and held[0] is session:
                del self._recent[session.id]
        self._runtime.worker.call(lambda: self._forget_closed(session._context, session.fresh))

    def _forget_closed(self, context: SessionContext, fresh: bool = False) -> None:
        writer = context.writer
        session_id = writer.record.id
        with self._lock:
            again = self._known(session_id)  # opened again meanwhile
            if again is None:
                self._sessions.pop(session_id, None)
                self._forget_name(session_id)
            if writer.is_unsettled:
                self._unsettled[session_id] = context
        if again is not None:
            return
        self._runtime.idle_prefill.forget(session_id)
        if fresh:
            with contextlib.suppress(Error):
                writer.follow()
                if writer.is_empty:  # an empty session is of no use
                    self._runtime.store.remove(writer.record)

    # --- deleting ----------------------------------------------------------------------------

    def delete(self, owner: str, name: str) -> None:
        """Stops and deletes a session. Raises NotFound."""
        record = self._runtime.worker.call(lambda: self._stored(owner, name))
        if record is None:
            raise NotFound(f"no session {shown(name)}")
        self.forget(record)

    def _stored(self, owner: str, name: str) -> SessionRecord | None:
        """Returns the stored session. A damaged one has only its id, which suffices to delete
        it."""
        store = self._runtime.store
        try:
            return store.find(owner, name)
        except StoreError:
            for one in store.summaries(owner):
                if one.name == name:
                    return SessionRecord(name, owner, "append", id=one.id)
            raise

    def forget(self, record: SessionRecord) -> None:
        """Deletes a session. Used by `Session.delete()`."""
        session, ids = self._runtime.worker.call(lambda: self._remove(record))
        if session is not None:
            session.close()
            ids += ends(session._record)  # with the tokens generated meanwhile
        free_pages(self._runtime, record.owner, ids)

    def _remove(self, record: SessionRecord) -> tuple[Session | None, list[Transcript]]:
        with self._lock:
            self._check_open()
            session = self._known(record.id)
        ids = ends(record) + unfinished(self._runtime.store, record)
        ids += unanswered_prompt(self._runtime, record)
        if session is None:
            self._runtime.store.remove(record)
        else:
            session.removed(lambda: self._runtime.store.remove(record))
        ids += self._runtime.idle_prefill.forget(record.id)
        with self._lock:
            self._unsettled.pop(record.id, None)
        return session, ids

    # --- all of them -------------------------------------------------------------------------

    def states(self, ids: Iterable[str]) -> dict[str, State]:
        """Returns the states of the sessions that are open, by id."""
        with self._lock:
            found = {i: self._known(i) for i in ids}
        return {i: session.state for i, session in found.items() if session is not None}

    def count(self) -> dict[State, int]:
        """Returns the number of open sessions in each state."""
        with self._lock:
            found = [session() for session in self._sessions.values()]
        return Counter(session.state for session in found if session is not None)

    def close(self) -> list[Session]:
        """Refuses to open further sessions, and returns those that are open."""
        with self._lock:
            self._is_closed = True
            found = [session() for session in self._sessions.values()]
        return [session for session in found if session is not None]

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosed("the chat engine has been closed")


def check_limits(idle_close: object, max_open: object) -> None:
    """Raises InvalidRequest for a limit that is out of range."""
    number = isinstance(idle_close, int | float) and not isinstance(idle_close, bool)
    if idle_close is not None and not (number and idle_close >= 0):  # type: ignore[operator]
        raise wrong("idle_close", idle_close, "seconds of at least 0, or None")
    if isinstance(max_open, bool) or not isinstance(max_open, int) or max_open < 1:
        raise wrong("max_open_sessions", max_open, "an integer of at least 1")


def _must_stay(session: Session) -> bool:
    """Returns whether a session stays open without a caller."""
    running = session.state not in (State.IDLE, State.CLOSED)
    return running or session.running is not None or session.pinned or session._writer.is_unsettled
