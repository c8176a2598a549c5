"""The reserve file: room on the disk for deletions when the disk is full.

Not here: when it is used (`database`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BYTES = 4 << 20
"""Size of the file: enough for the log of deleting a session of about 100,000 tokens."""

_ROOM = 8 * BYTES  # free bytes needed to allocate it
_HALVED = 6  # sizes tried, each half of the one before


class ReserveFile:
    """The reserve file at `path`. A system error counts as having none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self, *, from_the_last: bool = False) -> None:
        """Allocates the file if it is missing or too small.

        Args:
            from_the_last: also where the disk has less than 32 MiB free.
        """
        try:
            there = self._path.stat().st_size if self._path.exists() else 0
            if there >= BYTES or not (from_the_last or free_bytes(self._path.parent) >= _ROOM):
                return
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            if not any(_allocated(fd, BYTES >> halved) for halved in range(_HALVED)):
                self.release()
        finally:
            os.close(fd)

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


def _allocated(fd: int, size: int) -> bool:
    """Allocates `size` bytes for the file. Returns whether that succeeded."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
        os.posix_fallocate(fd, 0, size)
        return True
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    return False
