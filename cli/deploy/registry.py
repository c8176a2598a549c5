"""The one deployment of a data directory: its lock, its private folder, requests to its launcher.

The file `deployment` is locked while the launcher lives. It names the launcher's process and a
folder for Unix sockets, whose paths have at most 107 bytes; a data directory may be deeper.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmchat.errors import Error, InvalidRequest, NotFound
from lmchat.store.data_directory import DEPLOYMENT, data_dir

CONTROL = "control"
"""Name of the launcher's socket in its folder."""

_PREFIX = "lmchat-deploy-"
_LONGEST = 107 - len("/replica-9999") - len(_PREFIX) - 8  # bytes of the folder's parent
_TRIES = 5  # a command that looks at the lock holds it for a moment


@contextlib.contextmanager
def claimed() -> Iterator[Path]:
    """Makes this process the launcher of the user's data directory. Yields its private folder.

    Raises:
        InvalidRequest: a deployment runs there already.
    """
    fd = os.open(_path(), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for last in (False,) * _TRIES + (True,):
            if _lock(fd, fcntl.LOCK_EX):
                break
            if last:
                raise InvalidRequest(
                    f"a deployment runs on {data_dir()}, process {_record(fd).get('pid', '?')}: "
                    "end it with lmchat deploy stop"
                )
            time.sleep(0.05)
        _remove(_record(fd).get("folder"))  # of a launcher that was killed
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "folder": str(folder)}).encode(), 0)
            yield folder
        finally:
            _remove(str(folder))
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def status() -> dict[str, Any]:
    """Returns the status of the data directory's deployment.

    Raises:
        NotFound: none runs.
    """
    found: dict[str, Any] = json.loads(_ask(b"status"))
    return found


def restart(replica: int | None) -> Iterator[str]:
    """Restarts the replicas of the data directory's deployment one after the other.

    Args:
        replica: only this one; None: all.

    Yields:
        A sentence for each step.

    Raises:
        NotFound: no deployment runs.
        Error: a restart is refused or failed; replicas after it were not restarted.
    """
    for line in _asked(b"restart" if replica is None else b"restart %d" % replica):
        found = json.loads(line)
        if "error" not in found:
            yield found["step"]
        elif found["error"] is None:
            return
        else:
            raise Error(found["error"])
    raise Error("the launcher ended before the replicas were restarted")


def stop(now: bool) -> None:
    """Ends the data directory's deployment, and waits until it has ended.

    Args:
        now: running replies are not waited for.

    Raises:
        NotFound: none runs.
    """
    _ask(b"stop now" if now else b"stop")
    with open(_path(), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _ask(words: bytes) -> bytes:
    """Sends words to the launcher and returns all that it answers."""
    return b"".join(_asked(words))


def _asked(words: bytes) -> Iterator[bytes]:
    """Sends words to the launcher and yields the lines of its answer."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        fd = os.open(_path(), os.O_RDONLY)
        stack.callback(os.close, fd)
        if not _lock(fd, fcntl.LOCK_SH) and (folder := _record(fd).get("folder")):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(f"{folder}/{CONTROL}")
            connection.sendall(words + b"\n")
            yield from stack.enter_context(connection.makefile("rb"))
            return
    raise NotFound(
        f"no deployment runs on {data_dir()}: start one with lmchat deploy MODEL --replicas R"
    )


def _path() -> Path:
    return data_dir() / DEPLOYMENT


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record(fd: int) -> dict[str, Any]:
    """Returns the launcher's process and folder; empty while it has not written them."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _parent() -> str:
    """Returns the folder for private folders."""
    for path in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if path and len(os.fsencode(path)) <= _LONGEST and os.access(path, os.W_OK):
            return path
    raise InvalidRequest(
        f"no folder for Unix sockets: expected $XDG_RUNTIME_DIR, $TMPDIR or /tmp to be writable, "
        f"with a path of at most {_LONGEST} bytes"
    )


def _remove(folder: object) -> None:
    """Removes a private folder of a launcher of this user."""
    if isinstance(folder, str) and Path(folder).name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid == os.geteuid():
                shutil.rmtree(folder)
