"""The one deployment of a data directory: its lock, its private folder, requests to its launcher.

The file `deployment` is locked while the launcher lives. It names the launcher's process and a
folder for Unix sockets, whose paths have at most 107 bytes; a data directory may be deeper. The
folder is locked too, which systemd-tmpfiles respects; what other cleaners remove is written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmchat.errors import Error, InvalidRequest, NotFound, StoreError
from lmchat.store.data_directory import DEPLOYMENT, data_dir
from lmchat.store.temporary import shared_folder, system_folders

CONTROL = "control"
"""Name of the launcher's socket in its folder."""

ANSWER_SECONDS = 4.0
"""Time within which a launcher answers, or has ended after its last answer."""

_PREFIX = "lmchat-deploy-"
_LONGEST = 107 - len("/replica-9999") - len(_PREFIX) - 8  # bytes of the folder's parent
_TRIES = 5  # a command that looks at the lock holds it for a moment
_TRY_SECONDS = 0.05  # between two tries


class Claim:
    """The launcher's hold on a data directory, and its private folder `folder`."""

    def __init__(self, record: int) -> None:
        self._record, self._path = record, _path()
        _remove(_read(record).get("folder"))  # of a launcher that was killed
        self.folder, self._folder_lock = _private_folder()
        self._write()

    def restore(self) -> None:
        """Makes the record and the folder again where they are gone.

        Raises:
            OSError: that is not possible now.
            InvalidRequest: another deployment has claimed the data directory meanwhile.
        """
        if not _is_at(self._record, self._path):
            record = _locked_record()
            os.close(self._record)
            self._record = record
            self._write()
        if not _is_at(self._folder_lock, self.folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder.parent, 0o700)  # `tmp` in the data directory
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            lock = _locked_folder(self.folder)
            os.close(self._folder_lock)
            self._folder_lock = lock

    def release(self) -> None:
        """Removes the folder and ends the claim."""
        _remove(str(self.folder))
        os.ftruncate(self._record, 0)
        os.close(self._folder_lock)
        os.close(self._record)

    def _write(self) -> None:
        text = json.dumps({"pid": os.getpid(), "folder": str(self.folder)})
        os.ftruncate(self._record, 0)
        os.pwrite(self._record, text.encode(), 0)


@contextlib.contextmanager
def claimed() -> Iterator[Claim]:
    """Makes this process the launcher of the user's data directory.

    Raises:
        InvalidRequest: a deployment runs there already.
    """
    record = _locked_record()
    try:
        claim = Claim(record)
    except BaseException:
        os.close(record)
        raise
    try:
        yield claim
    finally:
        claim.release()


def status() -> dict[str, Any]:
    """Returns the status of the data directory's deployment.

    Raises:
        NotFound: none runs.
        Error: its launcher does not answer.
    """
    found: dict[str, Any] = json.loads(b"".join(_asked(b"status")))
    return found


def restart(replica: int | None) -> Iterator[str]:
    """Restarts the replicas of the data directory's deployment one after the other.

    Args:
        replica: only this one; None: all.

    Yields:
        A sentence for each step, and for each change while a step takes long.

    Raises:
        NotFound: no deployment runs.
        Error: a restart is refused or failed; replicas after it were not restarted. Or the launcher
            does not answer.
    """
    for line in _asked(b"restart" if replica is None else b"restart %d" % replica, _states()):
        found = json.loads(line)
        if "error" not in found:
            yield found["step"]
        elif found["error"] is None:
            return
        else:
            raise Error(found["error"])
    raise Error("the launcher ended before the replicas were restarted")


def stop(now: bool) -> Iterator[str]:
    """Ends the data directory's deployment, and waits until it has ended.

    Args:
        now: running replies are not waited for.

    Yields:
        A sentence for each change while that takes long.

    Raises:
        NotFound: none runs.
        Error: its launcher does not answer.
    """
    for line in _asked(b"stop now" if now else b"stop", _states()):
        yield json.loads(line)["step"]
    with open(_path(), "rb") as file:
        for _ in range(round(ANSWER_SECONDS / _TRY_SECONDS)):
            if _lock(file.fileno(), fcntl.LOCK_SH):
                return
            time.sleep(_TRY_SECONDS)
        raise _silent(file.fileno())


def _states() -> Callable[[], Iterator[bytes]]:
    """Returns what yields a line with the replicas that are awaited, if that has changed."""
    last = ""

    def look() -> Iterator[bytes]:
        nonlocal last
        states = [
            f"replica {one['replica']} is {one['state']}"
            for one in status()["replicas"]
            if one["state"] not in ("ready", "ended")
        ]
        before, last = last, f"waiting: {', '.join(states)}"
        if states and last != before:
            yield json.dumps({"step": last}).encode()

    return look


def _asked(words: bytes, meanwhile: Callable[[], Iterator[bytes]] | None = None) -> Iterator[bytes]:
    """Sends words to the launcher and yields the lines of its answer.

    Args:
        words: the words.
        meanwhile: is called when there has been no line for some seconds, and raises an error if
            the launcher does not answer at all; None: an answer that takes so long is an error.
    """
    if meanwhile is not None:
        status()  # raises an error at once
    with contextlib.ExitStack() as stack:
        fd = _opened_record(stack)
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(ANSWER_SECONDS)
        left = b""
        try:
            connection.connect(f"{_read(fd)['folder']}/{CONTROL}")
            connection.sendall(words + b"\n")
        except (OSError, KeyError) as error:
            raise _silent(fd) from error
        while True:
            try:
                part = connection.recv(1 << 16)
            except TimeoutError as error:
                if meanwhile is None:
                    raise _silent(fd) from error
                yield from meanwhile()
                continue
            except ConnectionError:
                part = b""
            *lines, left = (left + part).split(b"\n")
            yield from lines
            if not part:
                yield from filter(None, [left])
                return


def _opened_record(stack: contextlib.ExitStack) -> int:
    """Returns the descriptor of a running launcher's record.

    Raises:
        NotFound: there is no launcher.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(_path(), os.O_RDONLY)
        stack.callback(os.close, fd)
        if not _lock(fd, fcntl.LOCK_SH):
            return fd
        fcntl.flock(fd, fcntl.LOCK_UN)
    raise NotFound(
        f"no deployment runs on {data_dir()}: start one with lmchat deploy MODEL --replicas R"
    )


def _silent(fd: int) -> Error:
    """Returns the error of a launcher that lives but does not answer."""
    pid = _read(fd).get("pid", "?")
    return Error(
        f"the launcher of the deployment on {data_dir()}, process {pid}, does not answer: it "
        f"starts, hangs or is stopped; its replicas may serve on. kill -CONT {pid} continues a "
        f"stopped one, kill -KILL {pid} ends the deployment"
    )


def _path() -> Path:
    return data_dir() / DEPLOYMENT


def _locked_record() -> int:
    """Returns the descriptor of the data directory's record, which this process has locked.

    Raises:
        InvalidRequest: another process has.
        StoreError: it cannot be written.
    """
    path = _path()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StoreError(
            f"cannot use the file {path}: {error.strerror}; set LMCHAT_HOME to another folder"
        ) from error
    for _ in range(_TRIES):
        if _lock(fd, fcntl.LOCK_EX):
            return fd
        time.sleep(_TRY_SECONDS)
    pid = _read(fd).get("pid", "?")
    os.close(fd)
    raise InvalidRequest(
        f"a deployment runs on {data_dir()}, process {pid}: end it with lmchat deploy stop"
    )


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int) -> dict[str, Any]:
    """Returns the launcher's process and folder; empty while it has not written them."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_at(fd: int, path: Path) -> bool:
    """Returns whether an open file is that of a path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _private_folder() -> tuple[Path, int]:
    """Returns a new folder, and its descriptor, which has a lock of it."""
    for parent in (Path(os.environ.get("XDG_RUNTIME_DIR", "")), *system_folders()):
        with contextlib.suppress(OSError):  # it is missing, read-only or full
            return _folder_in(parent)
    with contextlib.suppress(OSError), shared_folder() as parent:
        return _folder_in(parent)
    raise InvalidRequest(
        "no folder for Unix sockets: expected $XDG_RUNTIME_DIR, $TMPDIR, /tmp, or tmp in the data "
        f"directory {data_dir()}, to be writable, with a path of at most {_LONGEST} bytes; set "
        "XDG_RUNTIME_DIR to such a folder"
    )


def _folder_in(parent: Path) -> tuple[Path, int]:
    """Returns a new folder in another, locked.

    Raises:
        OSError: that is not possible, or the path is too long, or takes no sockets.
    """
    if not parent.is_absolute() or len(os.fsencode(parent)) > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        path = folder / CONTROL
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
        return folder, _locked_folder(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _locked_folder(folder: Path) -> int:
    """Returns the descriptor of a private folder, with a shared lock: a cleaner that respects locks
    asks for one of its own. The next launcher does not ask, and the lock ends with this process."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        os.close(fd)
        raise InvalidRequest(f"{folder} belongs to another user, expected a private folder")
    with contextlib.suppress(OSError):  # a file system without locks
        _lock(fd, fcntl.LOCK_SH)
    return fd


def _remove(folder: object) -> None:
    """Removes a private folder of a launcher of this user."""
    if isinstance(folder, str) and Path(folder).name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid == os.geteuid():
                shutil.rmtree(folder)
