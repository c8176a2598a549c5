"""Where what outlives a process is kept, readable by its owner only."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from lmchat.errors import StoreError

DATABASE = "sessions.db"
"""The file of sessions in a home."""

_OURS = ("pages", "owners", "digests.json", DATABASE)


def home() -> Path:
    """`$LMCHAT_HOME`, else `lmchat` in the platform's folder for data; made on first use.

    Raises StoreError where it cannot be used.
    """
    given = os.environ.get("LMCHAT_HOME")
    folder = Path(given).expanduser().absolute() if given else _data_folder() / "lmchat"
    private_folder(folder)
    return folder


def _data_folder() -> Path:
    if sys.platform == "win32":
        given = os.environ.get("LOCALAPPDATA")
        return Path(given) if given else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    given = os.environ.get("XDG_DATA_HOME")  # which only counts when it is absolute
    return Path(given) if given and os.path.isabs(given) else Path.home() / ".local" / "share"


def private_folder(folder: Path) -> None:
    """Makes the folder, for its owner only. One of ours that others can see into is closed to them;
    of a folder that holds other things too the mode is left. StoreError where it is somebody
    else's, or cannot be made."""
    try:
        _make(folder)
        if is_own(folder, folder.stat()) and all(_is_ours(name) for name in os.listdir(folder)):
            _close(folder)
    except OSError as error:
        raise StoreError(f"cannot use the folder {folder}: {error.strerror or error}") from error


def _make(folder: Path) -> None:
    """With all parents, so that the machine's death does not take them back."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    if sys.platform != "win32":
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def private_file(path: Path) -> None:
    """Makes the file, for its owner only; one that others can read is closed to them. StoreError
    where it is somebody else's, or cannot be made."""
    try:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if is_own(path, path.stat()):
                _close(path)
    except OSError as error:
        raise StoreError(f"cannot use the file {path}: {error.strerror or error}") from error


def is_own(path: Path, facts: os.stat_result) -> bool:
    """Whether modes say who can read it, which is so but on Windows. StoreError when it belongs to
    another user."""
    if sys.platform == "win32":
        return False
    if facts.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {facts.st_uid}, expected {os.geteuid()}, who runs this; set "
            "LMCHAT_HOME to a folder of your own"
        )
    return True


def _close(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        path.chmod(mode & 0o700)


def _is_ours(name: str) -> bool:
    return name.startswith(_OURS)
