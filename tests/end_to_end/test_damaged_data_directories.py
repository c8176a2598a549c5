"""Damaged data directories of the whole stack: cases of `tests/stress`, and faults it found."""

import contextlib
import shutil
import sqlite3
import subprocess
import sys

import pytest
from assets import ROOT
from stores import (
    assert_same,
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    talk,
)

from lmchat.errors import StoreError
from lmchat.store.protocol import Stale
from lmchat.store.records import TurnStart
from lmchat.store.sqlite import tables
from lmchat.store.sqlite.schema import MIGRATIONS
from lmchat.store.sqlite.sqlite_store import SqliteStore


def test_damage_results_in_the_old_state_or_a_clear_error():
    command = [
        sys.executable,
        "-m",
        "tests.stress.data_directory_mutations",
        "--count",
        "12",
        "--seed",
        "8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "N 12, seed 8, failures 0" in done.stdout


@pytest.mark.parametrize("left", ["nothing", "an empty file"])
def test_a_log_without_its_file_is_not_deleted(data_dir, left):
    store = SqliteStore(data_dir)
    store.add(talk("a", 4))
    expected = store.find("me", "a")
    copy = data_dir.parent / "copy"  # as a process that was killed leaves it
    copy.mkdir()
    for name in ("sessions.db", "sessions.db-wal"):
        shutil.copy(data_dir / name, copy / name)
    store.close()
    (copy / "sessions.db").rename(copy / "original")
    log = (copy / "sessions.db-wal").read_bytes()
    if left != "nothing":
        (copy / "sessions.db").touch()
    with pytest.raises(StoreError, match=r"missing or empty, though its log sessions\.db-wal"):
        SqliteStore(copy)
    assert (copy / "sessions.db-wal").read_bytes() == log
    (copy / "original").replace(copy / "sessions.db")
    again = SqliteStore(copy)
    assert_same(again.find("me", "a"), expected)
    again.close()


@pytest.mark.parametrize(
    "lease", [(b"x", None), (0.5, None), (1 << 62, None), (7, "a\0b"), (7, b"\xff"), (7, "..")]
)
def test_a_damaged_lease_has_no_owner(data_dir, lease):
    """The writer that held it is stale."""
    store, other = SqliteStore(data_dir), SqliteStore(data_dir)
    store.add(talk("a", 4))
    theirs = other.begin(other.find("me", "a"), TurnStart(8, 20, 9, {}))
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute("UPDATE leases SET epoch = ?, owner = ?", lease)
        connection.commit()
    record = store.find("me", "a")
    assert store.unfinished(record).start.reply_id == 9
    assert store.recover(record).fencing_token > theirs.fencing_token
    with pytest.raises(Stale):
        other.journal([(theirs, [1])])
    assert store.verify() == []
    other.close()
    store.close()


def test_a_version_below_zero_is_damage(data_dir):
    SqliteStore(data_dir).close()
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute("PRAGMA user_version = -1")
    newest = len(MIGRATIONS)
    with pytest.raises(StoreError, match=f"damaged: its version is -1, expected 0 to {newest}"):
        SqliteStore(data_dir)


def test_a_schema_that_is_not_utf8_is_a_clear_error(data_dir):
    """SQLite's message quotes the damaged schema, which is not UTF-8."""
    SqliteStore(data_dir).close()
    path = data_dir / "sessions.db"
    data = path.read_bytes()
    assert b"CREATE TABLE leases" in data
    path.write_bytes(data.replace(b"CREATE TABLE leases", b"CREATE TABLE \xce\xce \xff\xff\xff"))
    with pytest.raises(StoreError, match=r"sessions\.db: the file is damaged .* Nothing of it was"):
        SqliteStore(data_dir)


def test_a_damaged_session_does_not_block_other_readers(data_dir):
    """An interrupted query must not hold later readers at its state of the file."""
    store = SqliteStore(data_dir)
    for name in ("a", "b"):
        store.add(talk(name, 8))
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute("UPDATE turns SET text = 'x' WHERE session = 1 AND id = 3")
        connection.commit()
    with pytest.raises(StoreError, match="damaged") as error:
        store.find("me", "a")
    record = store.find("me", "b")
    record = store.change(*grow(record))
    assert_same(store.find("me", "b"), record)
    assert error.value.__cause__ is not None  # it is still there
    store.close()


def test_a_session_with_a_damaged_name_is_a_clear_error(data_dir):
    """A flipped bit in the row's header, while the index still has the name."""
    store = SqliteStore(data_dir)
    store.add(talk("a", 4))
    with store._database.reading() as connection:
        row = tables.row_named(connection, "me", "a")
        row.name = None
        with pytest.raises(StoreError, match=r"session '\?' is damaged: the checksum of its row"):
            row.check()
        with pytest.raises(StoreError, match=r"session '\?' is damaged: the checksum of its row"):
            tables.load(connection, row)
    store.close()


def test_a_truncated_database_is_not_taken_for_a_new_one(data_dir):
    SqliteStore(data_dir).close()
    path = data_dir / "sessions.db"
    path.write_bytes(b"S")
    with pytest.raises(StoreError, match=r"the file is damaged: it has 1 bytes\. Put a backup"):
        SqliteStore(data_dir)
    assert path.read_bytes() == b"S"
    path.write_bytes(b"")  # as a process leaves it that is killed at its start
    SqliteStore(data_dir).close()
    (data_dir / "pages").mkdir()
    (data_dir / "pages" / "0123456789abcdef.idx").touch()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"the file is damaged: it has 0 bytes\. Put a backup"):
        SqliteStore(data_dir)
    path.unlink()
    SqliteStore(data_dir).close()
