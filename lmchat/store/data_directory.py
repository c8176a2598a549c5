"""The data directory: where it is, and files in it that only their owner can read.

Not here: what the files hold (`lmchat.store.sqlite`, and `cpp/tiers` for pages).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmchat.errors import StoreError

DATABASE = "sessions.db"
"""The name of the SQLite file in a data directory."""

DEPLOYMENT = "deployment"
"""The name of the file in a data directory that names the running deployment."""

TEMPORARY = "tmp"
"""The name of the folder in a data directory for temporary files, where the system has none."""

_OURS = ("pages", "owners", "digests.json", DATABASE, DEPLOYMENT)


def data_dir() -> Path:
    """Returns the user's data directory, and creates it on first use.

    It is `$LMCHAT_HOME` where that is set. Otherwise it is `lmchat` in the platform's folder for
    user data, on Linux `$XDG_DATA_HOME` (if absolute) or `~/.local/share`.

    Raises:
        StoreError: the directory cannot be created, belongs to another user, or there is no home
            directory for it.
    """
    folder = data_place()
    try:
        private_folder(folder)
    except StoreError as error:
        raise StoreError(
            str(error) if "LMCHAT_HOME" in str(error) else f"{error}; set LMCHAT_HOME to another"
        ) from error
    return folder


def data_place() -> Path:
    """Returns where the user's data directory is, also where it does not exist yet.

    Raises:
        StoreError: there is no home directory for it.
    """
    given = os.environ.get("LMCHAT_HOME")
    try:
        return Path(given).expanduser().absolute() if given else _platform_folder()
    except RuntimeError as error:  # neither $HOME nor the list of users has one
        raise StoreError(
            f"user {os.geteuid()} has no home directory for stored sessions; set LMCHAT_HOME to a "
            "folder"
        ) from error


def _platform_folder() -> Path:
    # The XDG specification says to ignore a relative path; platformdirs does not.
    given = os.environ.get("XDG_DATA_HOME")
    if given and not os.path.isabs(given):
        return Path.home() / ".local" / "share" / "lmchat"
    import platformdirs

    return Path(platformdirs.user_data_dir("lmchat", appauthor=False))


def private_folder(folder: Path) -> None:
    """Creates the folder with mode 0700.

    The mode of an existing folder is narrowed to its owner, unless it holds files of other programs
    too.

    Raises:
        StoreError: the folder cannot be created, or belongs to another user.
    """
    try:
        _make(folder)
        check_owner(folder, folder.stat())
        if all(name.startswith(_OURS) or name == TEMPORARY for name in os.listdir(folder)):
            _close(folder)
    except OSError as error:
        raise StoreError(f"cannot use the folder {folder}: {error.strerror or error}") from error


def _make(folder: Path) -> None:
    """Creates the folder and its parents, each synced so that it survives a power cut."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def private_file(path: Path) -> None:
    """Creates the file with mode 0600, or narrows the mode of an existing one to its owner.

    Raises:
        StoreError: the file cannot be created, or belongs to another user.
    """
    try:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            check_owner(path, path.stat())
            _close(path)
    except OSError as error:
        raise StoreError(f"cannot use the file {path}: {error.strerror or error}") from error


def check_owner(path: Path, facts: os.stat_result) -> None:
    """Raises StoreError where `path`, with these `facts`, belongs to another user."""
    if facts.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {facts.st_uid}, expected {os.geteuid()}, who runs this; set "
            "LMCHAT_HOME to a folder of your own"
        )


def _close(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        path.chmod(mode & 0o700)
