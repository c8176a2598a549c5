"""Durability of one engine's turns: syncs journals, and releases leases after pages are written.

A thread of its own does both, so that the reader thread never waits for a sync. It also stops the
turns for which other processes ask.

Not here: what a sync does (`lmchat.store.sqlite.database`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from lmchat.errors import Error, StoreClosed, StoreError
from lmchat.store.protocol import Stale, Store
from lmchat.store.records import Lease

if TYPE_CHECKING:
    from lmchat.generation.reader import Tokens
    from lmchat.kv.lower_tiers import LowerTiers

SYNC_SECONDS = 0.9
"""Longest time from journalling a token to the sync that makes it survive a power cut."""

SYNC_TOKENS = 64
"""Tokens of one turn after which the sync does not wait for SYNC_SECONDS."""

STOP_SECONDS = 0.25
"""Longest time until a turn without new tokens, of which each brings the requests to stop, sees
that it is to stop."""

_FLUSH_SECONDS = 0.1  # longest wait for pages; journals are synced between two waits
_AGAIN_SECONDS = 2.0  # from a failed release of a lease to the next attempt
_PAUSE = 0.002  # seconds between two waits for pages
_BEGAN, _JOURNALLED, _SYNC, _CLOSE = "began", "journalled", "sync", "close"  # events


class Durability:
    """The journal of one engine's turns.

    The reader thread calls `journal()` and `ended()`; neither waits for the thread here.
    """

    def __init__(self, store: Store, pages: LowerTiers) -> None:
        self._store = store
        self._pages = pages
        self._events: queue.SimpleQueue[Lease | str | Callable[[], object]] = queue.SimpleQueue()
        self._unsynced: dict[Lease, int] = {}  # tokens journalled since the last sync
        self._failed: Error | None = None  # the last sync
        self._ending: list[Lease] = []
        self._sync_at: float | None = None
        self._turns: dict[Lease, Callable[[], object]] = {}  # of running turns: stops it
        self._looked_at = 0.0  # last time of a look for requests to stop
        self._thread = threading.Thread(target=self._loop, name="lmchat-durability", daemon=True)
        self._thread.start()

    def began(self, lease: Lease, stop: Callable[[], object]) -> None:
        """Calls `stop`, which must not wait, if another process asks to stop the turn."""
        self._turns[lease] = stop
        self._events.put(_BEGAN)

    def journal(self, tokens: Tokens) -> Mapping[Lease, Exception]:
        """Journals tokens of several turns in one transaction.

        Returns:
            The error of each turn whose tokens could not be journalled.
        """
        failed, self._failed = self._failed, None
        if failed is not None:  # shown tokens are not durable: no more are shown
            return {lease: failed for lease, _ in tokens}
        lost = self._journal(tokens)
        self._count([entry for entry in tokens if entry[0] not in lost])
        return lost

    def _journal(self, tokens: Tokens) -> dict[Lease, Exception]:
        try:
            self._stop(self._store.journal(tokens))
        except Stale as error:
            return {lease: taken_over(error) for lease in error.leases or self._stale(tokens)}
        except Exception as error:
            if len(tokens) == 1:
                return {tokens[0][0]: as_store_error(error)}
            lost: dict[Lease, Exception] = {}
            for entry in tokens:  # one of them may be the reason
                lost |= self._journal([entry])
            return lost
        return {}

    def _stale(self, tokens: Tokens) -> list[Lease]:
        """Returns the leases that are not the newest, for a store that does not report them."""
        found = []
        for lease, _ in tokens:
            try:
                self._store.journal([(lease, [])])
            except Exception:
                found.append(lease)
        return found

    def _count(self, tokens: Tokens) -> None:
        counts = self._unsynced
        if tokens and not counts:
            self._events.put(_JOURNALLED)
        for lease, ids in tokens:
            before = counts.get(lease, 0)
            counts[lease] = before + len(ids)
            if before < SYNC_TOKENS <= counts[lease]:
                self._events.put(_SYNC)

    def ended(self, lease: Lease) -> None:
        """Releases the lease of a finished or abandoned turn, once all pages are written.

        Another process that needs the session earlier takes the lease over (`Store.begin()`).
        """
        self._turns.pop(lease, None)
        self._events.put(lease)

    def soon(self, work: Callable[[], object]) -> None:
        """Runs `work` on this thread soon. It must not raise, and may wait for the engine.

        Any thread may call this.
        """
        self._events.put(work)

    def close(self) -> None:
        """Releases all leases and ends the thread. Idempotent."""
        self._events.put(_CLOSE)
        self._thread.join()

    def _loop(self) -> None:
        while self._take():
            if self._sync_at is not None and time.monotonic() >= self._sync_at:
                self._sync()
            if self._turns and time.monotonic() >= self._looked_at + STOP_SECONDS:
                with contextlib.suppress(Exception):  # what fails now is tried again
                    self._stop(self._store.stops())
            if self._ending:
                self._release()
        self._release(wait=False)

    def _take(self) -> bool:
        """Waits for an event, or until a sync is due. Returns False at the end."""
        due = [] if self._sync_at is None else [self._sync_at]
        if self._turns:
            due.append(self._looked_at + STOP_SECONDS)
        if self._ending:  # a short wait: a closed engine returns at once
            due.append(time.monotonic() + _PAUSE)
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        try:
            event = self._events.get(timeout=timeout)
            while True:
                if isinstance(event, Lease):
                    self._ending.append(event)
                elif not isinstance(event, str):
                    event()
                elif event == _CLOSE:
                    return False
                elif event == _SYNC:
                    self._sync_at = time.monotonic()
                elif event == _JOURNALLED and self._sync_at is None:
                    self._sync_at = time.monotonic() + SYNC_SECONDS
                event = self._events.get_nowait()
        except queue.Empty:
            return True

    def _stop(self, leases: Iterable[Lease]) -> None:
        """Stops the turns for which other processes ask. Any thread may call it."""
        self._looked_at = time.monotonic()
        for lease in leases:
            if stop := self._turns.get(lease):
                stop()

    def _sync(self) -> None:
        self._sync_at, self._unsynced = (
            None,
            {},
        )  # before the sync: tokens that arrive during it count for the next
        try:
            self._store.sync()
        except Exception as error:
            self._failed = as_store_error(error)

    def _release(self, wait: bool = True) -> None:
        ending = list(self._ending)
        if wait and not self._pages.flush(_FLUSH_SECONDS):
            return
        del self._ending[: len(ending)]
        for lease in ending:
            try:
                self._store.release(lease)
            except StoreClosed:  # the process ends without closing the engine, and the lease too
                continue
            except Exception as error:  # the lease ends with this process or the next turn
                logging.getLogger(__name__).warning("a lease could not be released: %s", error)
                if wait:  # else a full disk would lock the session for other processes
                    again = threading.Timer(_AGAIN_SECONDS, self._events.put, (lease,))
                    again.daemon = True
                    again.start()


def taken_over(error: Stale) -> StoreError:
    """Returns the error of a turn whose session another process has taken over."""
    return StoreError(f"another process has taken the session over: {error}")


def as_store_error(error: Exception) -> Error:
    """Returns the error as one of `lmchat.errors`."""
    if isinstance(error, Stale):
        return taken_over(error)
    if isinstance(error, Error):
        return error
    found = StoreError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
