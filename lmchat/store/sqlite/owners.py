"""Which store holds a lease, and whether it lives.

Every open store has a file of its own in the folder `owners` and holds a lock on it. The kernel
frees the lock when the process ends, however it ends, so the dead are known at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
import uuid
from pathlib import Path

from lmchat.errors import StoreError

_NEW = ".new"
_TOKEN = re.compile("[0-9a-f]{32}")
_FORGOTTEN = 3600.0  # seconds after which an unfinished file is nobody's


class Owner:
    """This store's file in `folder`, locked from its making until `close()`."""

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex
        self._path = folder / self.token
        self._fd: int | None = None
        _remove_dead(folder)
        # It gets its name when it is locked, so nobody finds it without a lock.
        early = folder / (self.token + _NEW)
        try:
            self._fd = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if not _lock(self._fd, exclusive=True):
                raise StoreError(f"cannot lock {early}: it is locked")
            facts = {"pid": os.getpid(), "host": socket.gethostname()}
            os.write(self._fd, json.dumps(facts).encode())
            early.rename(self._path)
        except BaseException as error:
            self.close()
            with contextlib.suppress(OSError):
                early.unlink()
            if isinstance(error, OSError):
                why = error.strerror or str(error)
                raise StoreError(f"cannot lock a file in {folder}: {why}") from error
            raise

    def close(self) -> None:
        """Frees the lock and removes the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: the file and its lock are the parent's."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def living(folder: Path, token: str) -> str | None:
    """Who the owner is ("process 123"), None when it is dead, or no owner's token."""
    if not _TOKEN.fullmatch(token):
        return None
    try:
        fd = os.open(folder / token, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {folder / token}: {error.strerror or error}") from error
    try:
        if _lock(fd, exclusive=False):
            return None
        return _describe(os.read(fd, 4096))
    except OSError as error:
        raise StoreError(f"cannot lock {folder / token}: {error.strerror or error}") from error
    finally:
        os.close(fd)


def _describe(written: bytes) -> str:
    try:
        facts = json.loads(written)
        pid, host = int(facts["pid"]), str(facts["host"])
    except (ValueError, KeyError, TypeError):
        return "another process"
    return f"process {pid}" if host == socket.gethostname() else f"process {pid} on {host!r}"


def _remove_dead(folder: Path) -> None:
    """Files of the dead say nothing that their absence does not say."""
    with contextlib.suppress(OSError, StoreError):
        for path in list(folder.iterdir()):
            if path.name.endswith(_NEW):
                dead = time.time() - path.stat().st_mtime > _FORGOTTEN
            else:
                dead = living(folder, path.name) is None
            if dead:
                path.unlink()


def _lock(fd: int, *, exclusive: bool) -> bool:
    """Whether the lock was free. It ends with the last descriptor of this opening."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
