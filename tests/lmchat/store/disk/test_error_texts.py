"""What errors of SQLite say: which file or folder it was, and what to do."""

import errno
import sqlite3

import pytest

from lmchat.errors import LOGGABLE, StoreError
from lmchat.store.sqlite import database, error_texts
from lmchat.store.sqlite.sqlite_store import SqliteStore


def test_the_error_says_what_cannot_be_written(data_dir, monkeypatch):
    path = data_dir / "sessions.db"
    SqliteStore(data_dir).close()
    error = sqlite3.OperationalError("unable to open database file")
    monkeypatch.setattr(error_texts, "refusal", lambda folder: errno.EROFS)
    explained = error_texts.explained(error, path, 1)
    assert getattr(explained, LOGGABLE)
    assert str(explained) == (
        f"the store {path}: it cannot be written ({data_dir} is on a read-only file system): "
        "nothing was changed; set LMCHAT_HOME to a folder that can be written"
    )
    monkeypatch.undo()
    assert "it cannot be opened" in str(error_texts.explained(error, path, 1))


def test_what_a_statement_repeats_is_not_for_the_log(data_dir):
    error = sqlite3.OperationalError('fts5: syntax error near "words of a user"')
    explained = error_texts.explained(error, data_dir / "sessions.db", 1)
    assert not getattr(explained, LOGGABLE, False)


def test_an_sqlite_without_a_folder_is_not_taken_for_a_full_disk(data_dir, monkeypatch):
    """It ignores `PRAGMA temp_store` where it is compiled that way."""

    def migrate(connection):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_GETTEMPPATH"
        raise error

    monkeypatch.setattr(database.schema, "migrate", migrate)
    with pytest.raises(StoreError, match="Set SQLITE_TMPDIR to a folder that can be written"):
        SqliteStore(data_dir)
