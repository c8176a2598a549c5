"""The bound of sessions that one owner can have."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from lmchat.engine import ChatEngine
from lmchat.server.errors import HttpError


class SessionLimit:
    """Bounds the sessions of each owner. For any thread but the event loop's: it reads the store.

    Args:
        engine: the engine with the sessions.
        most: largest number of sessions of one owner.
    """

    def __init__(self, engine: ChatEngine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._lock = threading.Lock()
        self._pending: Counter[str] = Counter()  # sessions being created, by owner

    @contextlib.contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """Lets the caller create one session of the owner in its body.

        Raises:
            HttpError: the owner has as many as it can have.
        """
        with self._lock:
            if self._engine.count_sessions(owner) + self._pending[owner] >= self._most:
                raise HttpError(
                    400,
                    f"the owner has {self._most} sessions, which is the limit; delete some",
                    code="too_many_sessions",
                )
            self._pending[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pending[owner] -= 1
