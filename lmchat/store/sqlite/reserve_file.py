"""Room on a disk that is set aside for the time when there is no other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BYTES = 4 << 20
"""What it takes: the log of deleting a session of some 100,000 tokens, or of many short ones."""

_ROOM = 8 * BYTES  # free bytes from which on it is made
_HALVED = 6  # times at most, where there is less


class Spare:
    """The file `path`, of no use but its size. Errors of the system mean that there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set_aside(self, *, from_the_last: bool = False) -> None:
        """Makes the file where it is missing, or smaller than it should be, and the disk has room
        to spare; `from_the_last`: wherever it has any."""
        try:
            there = self._path.stat().st_size if self._path.exists() else 0
            if there >= BYTES or not (from_the_last or free_bytes(self._path.parent) >= _ROOM):
                return
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            if not any(_allocated(fd, BYTES >> halved) for halved in range(_HALVED)):
                self.give_up()
        finally:
            os.close(fd)

    def give_up(self) -> bool:
        """Removes the file; whether there was one."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False


def free_bytes(folder: Path) -> int:
    """What the file system of the folder has left for this user. OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _allocated(fd: int, size: int) -> bool:
    """Whether the file could be made to take so many bytes of the disk."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: a system without it
        os.posix_fallocate(fd, 0, size)
        return True
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
    return False
