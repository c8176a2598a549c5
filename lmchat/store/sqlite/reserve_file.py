"""The reserve file: room for deletions on a full disk. It is made whenever there is room for it.

Not here: when it is used (`database`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BYTES = 4 << 20
"""Size of the file: enough for the log of deleting a session of about 100,000 tokens."""

_SHARE = 8  # it takes at most this part of the free bytes
_LEAST = 128 << 10  # bytes: a smaller file is of no use


class ReserveFile:
    """The reserve file at `path`. A system error counts as having none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self, *, from_the_last: bool = False) -> None:
        """Allocates the file if it is missing or too small, and there is room for it: on a small
        disk for a smaller one. It may be called often.

        Args:
            from_the_last: also where it takes more than an eighth of what is free.
        """
        with contextlib.suppress(OSError):
            there = self._path.stat().st_size if self._path.exists() else 0
            if there >= BYTES:
                return
            free = free_bytes(self._path.parent) // (1 if from_the_last else _SHARE)
            size = BYTES
            while size > max(there, _LEAST) and (size > free or not self._grow(size)):
                size //= 2

    def _grow(self, size: int) -> bool:
        """Allocates `size` bytes for the file, or leaves it as it is. Returns whether it did."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            there = os.fstat(fd).st_size
            try:
                os.posix_fallocate(fd, 0, size)
            except (OSError, AttributeError):  # AttributeError: not on this system
                os.ftruncate(fd, there)
                return False
        finally:
            os.close(fd)
        return True

    def release(self) -> bool:
        """Removes the file. Returns whether it existed."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False


def free_bytes(folder: Path) -> int:
    """Returns the bytes that the folder's file system has free for this user. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
