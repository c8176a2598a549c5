"""Room for the store on a full disk: the pages of KV beside it give way.

KV can be computed again, what users have written cannot. Pages are removed by marks and holes in
their files, which needs no room, on the thread that could not write: it waits for no other one.

Not here: which pages stay (`running`), how pages are removed (`cpp/tiers/disk`), and the reserve
file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from lmchat.store.sqlite.reserve_file import free_bytes
from turbomind.errors import Error

FIRST_BYTES = 4 << 20
"""Bytes of KV that leave first. Each further attempt removes twice as many."""

_LEAST_FREE = 64 << 10  # bytes: the index of a log alone has 32 KiB
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of system errors that mean that the disk is full."""


class Room:
    """The room on the disk of a data directory.

    Any thread may call it.

    Args:
        folder: the data directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.made = 0
        """How many times room was made; a caller whose attempt began earlier tries again."""

    def make(self, size: int, seen: int, needed: Callable[[], Iterable[bytes]]) -> bool:
        """Removes pages of KV, the least valuable first, if the disk is full.

        Args:
            size: bytes to free, at least.
            seen: `made` when the caller's attempt began.
            needed: returns the keys of pages that stay.

        Returns:
            Whether there is more room than at that attempt.
        """
        with self._lock:
            if self.made != seen:
                return True
            if not is_full(self._folder) or not self._evict(size, needed):
                return False
            self.made += 1
            return True

    def _evict(self, size: int, needed: Callable[[], Iterable[bytes]]) -> int:
        from turbomind.engine.pages import PageStore

        pages = self._folder / "pages"
        if not pages.is_dir():
            return 0
        with contextlib.suppress(Error), PageStore(pages) as store:
            return store.evict(size, needed())
        return 0


def is_full(folder: Path) -> bool:
    """Returns whether the folder's disk, or this user's quota of it, has no room for a log."""
    return refusal(folder) in FULL


def refusal(folder: Path) -> int:
    """Returns the number of the system's error at an attempt to write a log in the folder, else 0.

    Only an attempt shows that, also where the number of files is exhausted.
    """
    probe = folder / "sessions.db-probe"
    try:
        if free_bytes(folder) < _LEAST_FREE:
            return errno.ENOSPC
        fd = os.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, _LEAST_FREE)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return 0
