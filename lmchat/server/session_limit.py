"""The bound of sessions that one owner can have."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from lmchat.aio.threads import shared
from lmchat.engine import ChatEngine
from lmchat.server.errors import HttpError


class SessionLimit:
    """Bounds the sessions of each owner. It reads the store, so `async_room()` is for the event
    loop.

    Args:
        engine: the engine with the sessions.
        most: largest number of sessions of one owner.
        make_room: called with an owner at the bound and the number of sessions to delete; returns
            how many it has deleted.
    """

    def __init__(self, engine: ChatEngine, most: int, make_room: Callable[[str, int], int]) -> None:
        self._engine = engine
        self._most = most
        self._make_room = make_room
        self._batch = max(1, most // 100)  # deleted at once, as finding them takes time
        self._lock = threading.Lock()
        self._evicting = threading.Lock()
        self._pending: Counter[str] = Counter()  # sessions being created, by owner

    def _reserved(self, owner: str) -> bool:
        with self._lock:
            has_room = self._engine.count_sessions(owner) + self._pending[owner] < self._most
            self._pending[owner] += has_room
            return has_room

    @contextlib.asynccontextmanager
    async def async_room(self, owner: str) -> AsyncIterator[None]:
        """As `room()`, for the event loop."""
        room = self.room(owner)
        entering = shared.start(room.__enter__)
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(
                lambda entered: entered.exception() or room.__exit__(None, None, None)
            )
            raise
        try:
            yield
        finally:
            room.__exit__(None, None, None)  # it never waits

    @contextlib.contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """Lets the caller create one session of the owner in its body.

        Raises:
            HttpError: the owner has as many as it can have.
        """
        if not self._reserved(owner):
            with self._evicting:
                is_reserved = self._reserved(owner)
                if not is_reserved and self._make_room(owner, self._batch):
                    is_reserved = self._reserved(owner)
            if not is_reserved:
                raise HttpError(
                    400,
                    f"the owner has {self._most} sessions, which is the limit; delete some",
                    code="too_many_sessions",
                )
        try:
            yield
        finally:
            with self._lock:
                self._pending[owner] -= 1
