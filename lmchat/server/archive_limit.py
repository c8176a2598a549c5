"""The bound of archives that one owner can export or import at once, and the threads for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from lmchat.aio.threads import Threads
from lmchat.server.errors import HttpError

threads = Threads(4)
"""Threads that make and read archives, which takes seconds. No other request waits for them."""


class ArchiveLimit:
    """Bounds the archives of each owner, and so its temporary files. For the event loop's thread.

    Args:
        most: largest number of archives of one owner.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._busy: Counter[str] = Counter()  # archives in progress, by owner

    @contextlib.contextmanager
    def room(self, owner: str) -> Iterator[None]:
        """Lets the caller make, send or read one archive of the owner in its body.

        Raises:
            HttpError: the owner has as many as it can have.
        """
        if self._busy[owner] >= self._most:
            raise HttpError(
                429,
                f"{self._busy[owner]} archives of the owner are in progress, expected fewer than "
                f"{self._most} before another one",
                code="too_many_archives",
                headers={"Retry-After": "1"},
            )
        self._busy[owner] += 1
        try:
            yield
        finally:
            self._busy[owner] -= 1
            if not self._busy[owner]:
                del self._busy[owner]
