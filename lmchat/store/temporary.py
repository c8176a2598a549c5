"""The folder for temporary files: the system's, else `tmp` in the data directory.

A container with a read-only root has one folder that can be written, the data directory. `tmp` in
it has a folder for each process, locked (flock) while that process lives. Those of ended processes
are removed when a process opens the store there, or makes a folder of its own.

Not here: files that replace others, which are made beside them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmchat.errors import StoreError, loggable
from lmchat.store.data_directory import TEMPORARY, data_dir, private_folder

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_USUAL = ("/tmp", "/var/tmp", "/usr/tmp")
_PROBE_BYTES = 4096  # of the file that shows whether a folder has room
_OURS = "lmchat-"  # what names of folders in `tmp` begin with
_PREFIX = f"{_OURS}process-"

_own: tuple[int, Path, int] | None = None  # a process, its folder in `tmp`, and its descriptor


def temporary_folder() -> Path:
    """Returns a folder in which files can be written now.

    It is `$TMPDIR`, `$TEMP`, `$TMP`, `/tmp`, `/var/tmp` or `/usr/tmp`, else this process's own
    folder in the data directory. The current folder, which Python would take, holds files of the
    user's.

    Raises:
        StoreError: none of them can be written.
    """
    for folder in system_folders():
        if _takes_files(folder):
            return folder
    try:
        folder = _own_folder()
        if _takes_files(folder):
            return folder
        why = f"{folder} cannot be written"
    except (StoreError, OSError) as cause:
        why = str(cause)
    error = StoreError(
        f"no folder for temporary files: none of {', '.join(map(str, system_folders()))} can be "
        f"written, and {why}. Set TMPDIR, or LMCHAT_HOME, to a folder that can be written"
    )
    raise loggable(error)


def use_temporary_folder() -> None:
    """Makes `temporary_folder()` the one of other packages in this process, which would end with an
    error, or write in the current folder, where the system has none.

    Raises:
        StoreError: there is none.
    """
    tempfile.tempdir = str(temporary_folder())


def system_folders() -> list[Path]:
    """Returns the system's folders for temporary files, the preferred first. A program's choice,
    `tempfile.tempdir`, comes before all others."""
    named = [tempfile.tempdir, *(os.environ.get(name) for name in _VARIABLES), *_USUAL]
    folders: list[Path] = []
    for name in named:
        with contextlib.suppress(OSError):  # a relative one, while the current folder is gone
            folder = Path(os.path.abspath(os.fsdecode(name))) if name else None
            if folder is not None and folder not in folders:
                folders.append(folder)
    return folders


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yields `tmp` in the data directory, in which no folder is removed meanwhile: one that is made
        there, with a name that begins with "lmchat-", is to be locked before the end.

    Raises:
        StoreError: it cannot be made.
        OSError: it cannot be used.
    """
    folder = data_dir() / TEMPORARY
    private_folder(folder)
    with _locked(folder):
        yield folder


def remove_leftovers(data: Path) -> None:
    """Removes what ended processes have left in `tmp` of the data directory `data`."""
    folder = data / TEMPORARY
    if folder.is_dir():
        with contextlib.suppress(OSError), _locked(folder):
            _sweep(folder)


def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return file.write(bytes(_PROBE_BYTES)) == _PROBE_BYTES
    except OSError:
        return False


def _own_folder() -> Path:
    """Returns this process's folder in `tmp`, which goes with the process."""
    global _own
    with shared_folder() as parent:
        if _own is not None:
            process, folder, descriptor = _own
            if process == os.getpid() and folder.parent == parent and _is_at(descriptor, folder):
                return folder
            if process == os.getpid():
                _leave()
        _sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if _own is None:
            atexit.register(_leave)
        _own = os.getpid(), folder, descriptor
    return folder


def _leave() -> None:
    """Removes this process's folder."""
    if _own is not None and _own[0] == os.getpid():
        shutil.rmtree(_own[1], ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(_own[2])


def _sweep(parent: Path) -> None:
    """Removes folders in `parent` that no process has locked."""
    for folder in parent.glob(f"{_OURS}*"):
        with contextlib.suppress(OSError), _locked(folder, os.O_NOFOLLOW, fcntl.LOCK_NB):
            shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: Path, flags: int = 0, how: int = 0) -> Iterator[None]:
    """Locks a folder against other processes.

    Args:
        folder: the folder.
        flags: further flags of open.
        how: further flags of flock.

    Raises:
        OSError: it is not a folder, its file system has no locks, or it is locked and not waited
            for.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False
