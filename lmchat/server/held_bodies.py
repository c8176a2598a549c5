"""Bounds the memory that the bodies of one owner's requests take."""

from __future__ import annotations

from collections import Counter

from lmchat.server.errors import HttpError


class HeldBodies:
    """Bytes of the bodies in memory, by owner.

    Args:
        most: largest number of bytes of one owner.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def add(self, owner: str, size: int) -> None:
        """Counts bytes of an owner.

        Raises:
            HttpError: the owner would have too many.
        """
        if self._held[owner] + size > self._most:
            raise HttpError(
                429,
                f"the bodies of the requests in progress take more than {self._most} bytes",
                code="too_many_bodies",
                headers={"Retry-After": "1"},
            )
        self._held[owner] += size

    def remove(self, owner: str, size: int) -> None:
        """Counts bytes of an owner no longer."""
        self._held[owner] -= size
        if not self._held[owner]:
            del self._held[owner]
