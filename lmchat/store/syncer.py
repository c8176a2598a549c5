"""When what was written is safe: journals are synced, and leases end when pages are down.

All of it by a thread of its own, so that the reader never waits for a disk's cache.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lmchat.errors import Error, StoreError
from lmchat.store.protocol import Stale, Store
from lmchat.store.records import Lease

if TYPE_CHECKING:
    from lmchat.generation.reader import Tokens
    from lmchat.kv.lower_tiers import LowerTiers

SYNC_SECONDS = 0.9
"""Longest time a journalled token waits to be safe from the machine's death (with the sync itself,
a second)."""

SYNC_TOKENS = 64
"""As many tokens of one turn do not wait for that."""

_FLUSH_SECONDS = 0.1  # of one wait for pages: others' journals are synced in between
_AGAIN_SECONDS = 2.0  # until a lease that the store could not take back is given back again
_PAUSE = 0.002  # seconds between two such waits


class Durability:
    """The journal of one engine's turns. `journal()` and `ended()` are the reader thread's; neither
    waits for the thread here."""

    def __init__(self, store: Store, pages: LowerTiers) -> None:
        self._store = store
        self._pages = pages
        self._news: queue.SimpleQueue[Lease | str | Callable[[], object]] = queue.SimpleQueue()
        self._unsynced: dict[Lease, int] = {}  # tokens journalled since the last sync
        self._failed: Error | None = None  # the last sync
        self._ending: list[Lease] = []
        self._sync_at: float | None = None
        self._thread = threading.Thread(target=self._loop, name="lmchat-durability", daemon=True)
        self._thread.start()

    def journal(self, tokens: Tokens) -> Mapping[Lease, Exception]:
        """Keeps the tokens in one transaction; says of which turns it could not, and why."""
        failed, self._failed = self._failed, None
        if failed is not None:  # what was shown is not safe: nothing more is
            return {lease: failed for lease, _ in tokens}
        lost = self._journal(tokens)
        self._count([entry for entry in tokens if entry[0] not in lost])
        return lost

    def _journal(self, tokens: Tokens) -> dict[Lease, Exception]:
        try:
            self._store.journal(tokens)
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
        """Which leases are not the newest, of a store that does not say."""
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
            self._news.put("journalled")
        for lease, ids in tokens:
            before = counts.get(lease, 0)
            counts[lease] = before + len(ids)
            if before < SYNC_TOKENS <= counts[lease]:
                self._news.put("sync")

    def ended(self, lease: Lease) -> None:
        """The turn is finished, or nothing came of it: the lease is given back when all pages that
        were posted are down."""
        self._news.put(lease)

    def soon(self, work: Callable[[], object]) -> None:
        """The thread here does `work`, which must not raise and may wait for the engine. Any
        thread."""
        self._news.put(work)

    def close(self) -> None:
        """Gives all leases back and ends the thread. Idempotent."""
        self._news.put("close")
        self._thread.join()

    def _loop(self) -> None:
        while self._take():
            if self._sync_at is not None and time.monotonic() >= self._sync_at:
                self._sync()
            if self._ending:
                self._release()
        self._release(wait=False)

    def _take(self) -> bool:
        """Waits for news, or until something is due; False for the end."""
        timeout = None if self._sync_at is None else max(0.0, self._sync_at - time.monotonic())
        if self._ending:  # a moment, for an engine that is closed answers at once
            timeout = min(_PAUSE, _PAUSE if timeout is None else timeout)
        try:
            news = self._news.get(timeout=timeout)
            while True:
                if isinstance(news, Lease):
                    self._ending.append(news)
                elif not isinstance(news, str):
                    news()
                elif news == "close":
                    return False
                elif news == "sync":
                    self._sync_at = time.monotonic()
                elif self._sync_at is None:
                    self._sync_at = time.monotonic() + SYNC_SECONDS
                news = self._news.get_nowait()
        except queue.Empty:
            return True

    def _sync(self) -> None:
        self._sync_at, self._unsynced = None, {}  # before: what comes meanwhile is counted anew
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
            except Exception as error:  # it ends with this process, or with the session's next turn
                logging.getLogger(__name__).warning("a lease could not be given back: %s", error)
                if wait:  # a full disk, or a long writer: nobody else could use the session
                    again = threading.Timer(_AGAIN_SECONDS, self._news.put, (lease,))
                    again.daemon = True
                    again.start()


def taken_over(error: Stale) -> StoreError:
    """Another process holds the session, which took this one for dead."""
    return StoreError(f"another process has taken the session over: {error}")


def as_store_error(error: Exception) -> Error:
    """The error as one of the tree."""
    if isinstance(error, Stale):
        return taken_over(error)
    if isinstance(error, Error):
        return error
    found = StoreError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
