"""Errors of SQLite as sentences: what happened, which file or folder it was, what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from lmchat.errors import StoreError, loggable
from lmchat.store.sqlite.room import FULL, is_full, refusal
from turbomind.config.limits import is_exhausted

_FILES = 4  # that a connection may open: file, log, its index, and the folder to sync it
_NOT_WRITTEN = ("unable to open", "readonly", "read-only")
_OF_FILES = (
    "attempt to write a readonly database",
    "database is locked",
    "database or disk is full",
    "disk I/O error",
    "unable to open database file",
)
"""Messages of SQLite about files, whole."""


def explained(
    error: sqlite3.Error | UnicodeDecodeError, path: Path, busy_seconds: float
) -> StoreError:
    """Returns an error as one with a sentence. A message of SQLite's that repeats nothing of a
    statement is for the log.

    Args:
        error: the error.
        path: the store's file.
        busy_seconds: longest wait for a transaction of another process.
    """
    found = StoreError(f"the store {path}: {_sentence(error, path, busy_seconds)}")
    return loggable(found) if str(error) in _OF_FILES else found


def _sentence(error: sqlite3.Error | UnicodeDecodeError, path: Path, busy_seconds: float) -> str:
    message = str(error)
    unreadable = isinstance(error, UnicodeDecodeError) or "UTF-8" in message
    if unreadable or "malformed" in message or "not a database" in message:
        return (
            f"the file is damaged ({message}). Nothing of it was deleted: copy it, with "
            f"{path.name}-wal, to a safe place, then put a backup in its place, or recover what is "
            "readable with `sqlite3 FILE .recover`, or move it away to begin with no sessions"
        )
    if "full" in message:
        return f"the disk is full ({message}): nothing was changed"
    if "unable to open" in message and is_exhausted(_FILES):
        return os.strerror(errno.EMFILE)
    if lacks_folder(error):
        return (
            f"this Python's SQLite found no folder for a temporary file ({message}): nothing was "
            "changed. Set SQLITE_TMPDIR to a folder that can be written"
        )
    refused = _refused(path) if any(words in message for words in _NOT_WRITTEN) else ""
    if refused:
        return (
            f"it cannot be written ({refused}): nothing was changed; set LMCHAT_HOME to a folder "
            "that can be written"
        )
    if "readonly" in message or "read-only" in message:
        return f"it cannot be written ({message}): nothing was changed"
    if "locked" in message:
        return f"another process has written for more than {busy_seconds:.0f} s ({message})"
    if "disk I/O" in message and is_full(path.parent):
        return f"the disk is full ({message}): nothing was changed"
    if "disk I/O" in message:
        return f"the disk refused to read or write ({message}): nothing was changed"
    if "unable to open" in message:
        return f"it cannot be opened ({message}): are file and folder there, and yours to write?"
    if "fts5" in message:
        return f"this Python's SQLite has no full-text search ({message})"
    return message


def lacks_folder(error: BaseException) -> bool:
    """Returns whether SQLite needed a temporary file and had no folder for it, which happens only
    where it is compiled to ignore `PRAGMA temp_store`. Python 3.10 does not report that."""
    return getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_GETTEMPPATH"


def _refused(path: Path) -> str:
    """Returns which file or folder of the store this process may not write, empty if it may."""
    number = refusal(path.parent)
    if number == errno.EROFS:
        return f"{path.parent} is on a read-only file system"
    if number in (errno.EACCES, errno.EPERM):
        return f"user {os.geteuid()} may not write in {path.parent}"
    if number not in FULL and path.exists() and not os.access(path, os.W_OK):
        return f"user {os.geteuid()} may not write {path}"
    return ""
