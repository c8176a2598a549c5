"""Owners of leases, and whether their processes live.

Every open store has a file in the folder `owners` and holds a lock on it. The kernel releases the
lock when the process ends, however it ends, so a dead owner is detected at once.

Not here: the leases (`journal`).
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
from lmchat.store.data_directory import private_folder

_NEW = ".new"
_TOKEN = re.compile("[0-9a-f]{32}")
_FORGOTTEN = 3600.0  # seconds after which an unfinished file has no owner


class Owner:
    """This store's file in `folder`, locked until `close()`.

    Raises:
        StoreError: the file cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        self.token = uuid.uuid4().hex
        self._path = folder / self.token
        self._fd: int | None = None
        _remove_dead(folder)
        # It gets its name after it is locked, so no process finds it unlocked.
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
        """Releases the lock and removes the file. Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(fd)

    def abandon(self) -> None:
        """Closes the file in a forked child; the file and its lock are the parent's."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class Holding:
    """The owner that holds a store's leases: made when the first one is taken.

    Args:
        folder: the folder of owners.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_made = False
        """Whether it has marked a session as new."""
        self._owner: Owner | None = None

    def owner(self) -> Owner:
        """Returns this store's owner, and makes it first if needed: only for a store that
        writes."""
        if self._owner is None:
            private_folder(self.folder)
            self._owner = Owner(self.folder)
        return self._owner

    def maker(self) -> str:
        """Returns the owner's token, for a session that it makes."""
        self.has_made = True
        return self.owner().token

    @property
    def token(self) -> str | None:
        """The owner's token; None before the first lease."""
        return None if self._owner is None else self._owner.token

    def abandon(self) -> None:
        """Abandons the owner in a forked child: it is the parent's."""
        if self._owner is not None:
            self._owner.abandon()
            self._owner = None
            self.has_made = False

    def close(self) -> None:
        """Ends the owner. Idempotent."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None


def living(folder: Path, token: str) -> str | None:
    """Describes a living owner ("process 123"). Returns None for a dead one, or no token."""
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
    """Removes files of dead owners, which mean the same as no file."""
    with contextlib.suppress(OSError, StoreError):
        for path in list(folder.iterdir()):
            if path.name.endswith(_NEW):
                dead = time.time() - path.stat().st_mtime > _FORGOTTEN
            else:
                dead = living(folder, path.name) is None
            if dead:
                path.unlink()


def _lock(fd: int, *, exclusive: bool) -> bool:
    """Locks the file without waiting. Returns whether the lock was free."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
