"""The store on a disk that is damaged, full, read-only or owned by another user."""

import contextlib
import os
import random
import re
import resource
import shutil
import sqlite3
import stat
import threading
import zlib

import process_limits
import pytest
from old_stores import write_version_1, write_version_2
from stores import (
    assert_same,
    fields,
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    reply,
    talk,
    user,
)

from lmchat.errors import StoreError
from lmchat.store import data_directory
from lmchat.store.protocol import Stale
from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite import codec, database, schema
from lmchat.store.sqlite.sqlite_store import SqliteStore

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def filled(data_dir):
    """Three sessions, one with a journal of a process that died."""
    store = SqliteStore(data_dir)
    for name in ("a", "b", "c"):
        store.add(talk(name, 8, f"words of {name} " * 40))
    lease = store.begin(store.find("me", "c"), TurnStart(16, 40, 17, {"seed": 1}))
    store.journal([(lease, [number]) for number in range(50)])
    store.close()
    return data_dir


def edit(data_dir, statement, *values):
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute(statement, values)
        connection.commit()


# --- damaged rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE sessions SET body = X'7b' WHERE name = 'a'", "checksum of its row"),
        ("UPDATE sessions SET leaf = 99 WHERE name = 'a'", "checksum of its row"),
        ("UPDATE sessions SET created = 'x' WHERE name = 'a'", "checksum of its row"),
        ("UPDATE turns SET token_ids = X'02ff' WHERE session = 1 AND id = 3", "turn 3 is wrong"),
        ("UPDATE turns SET text = 'x' WHERE session = 1 AND id = 3", "turn 3 is wrong"),
        ("UPDATE turns SET text = X'ff' WHERE session = 1 AND id = 3", "turn 3 is wrong"),
        ("UPDATE turns SET keep = 'x' WHERE session = 1 AND id = 3", "turn 3 is wrong"),
        ("DELETE FROM turns WHERE session = 1 AND id = 3", "under turn 3, which is not there"),
        ("DELETE FROM turns WHERE session = 1 AND id = 16", "15 turns, expected 16"),
        ("UPDATE turns SET session = 1, id = 90 WHERE session = 2 AND id = 16", "turn 90 is wrong"),
    ],
)
def test_a_damaged_session_leaves_the_others(filled, statement, message):
    edit(filled, statement)
    store = SqliteStore(filled)
    with pytest.raises(StoreError, match=rf"session 'a' is damaged: .*{message}"):
        store.find("me", "a")
    with pytest.raises(StoreError, match="session '[ab]' is damaged"):
        store.records()
    other = store.find("me", "c")
    other = store.change(*grow(other))
    assert_same(store.find("me", "c"), other)
    assert {s.name for s in store.summaries()} == {"a", "b", "c"}
    assert any("session 'a'" in problem for problem in store.verify())
    (damaged,) = [s for s in store.summaries() if s.name == "a"]
    store.remove(SessionRecord(damaged.name, damaged.owner, "append", id=damaged.id))
    assert store.find("me", "a") is None
    store.close()


def sealed_again(data_dir, column, value):
    """A row that is no session although its checksums are right: a bug wrote it."""
    store = SqliteStore(data_dir)
    with store._database.writing() as connection:
        connection.execute(f"UPDATE turns SET {column} = ? WHERE session = 1 AND id = 3", (value,))
        row = connection.execute(
            f"SELECT {', '.join(schema_columns())} FROM turns WHERE session = 1 AND id = 3"
        ).fetchone()
        (session,) = connection.execute("SELECT id FROM sessions WHERE key = 1").fetchone()
        connection.execute(
            "UPDATE turns SET checksum = ? WHERE session = 1 AND id = 3",
            (codec.checksum(session, *row),),
        )
    return store


def schema_columns():
    return ("id", "parent", "role", "keep", "length", "text", "token_ids", "body")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("keep", 4, "turn 3 has 4 \\+ 2 tokens, expected 7"),
        ("token_ids", b"", "no width"),
        ("token_ids", b"\x04abc", "multiple"),
        ("body", b"[]", "keys"),
        ("body", b"{", ""),
        ("body", b'{"future": 1}', "field 'future' is unknown: a newer lmchat wrote it"),
        ("body", b'{"usage": {"x": 1}}', "x"),
        ("body", b'{"a": ' + b"[" * 100000, ""),
        ("body", b'{"$": "what"}', "what"),
        ("parent", 77, "turn 3 hangs under turn 77, which is not there"),
    ],
)
def test_rows_that_are_no_turns(filled, column, value, message):
    store = sealed_again(filled, column, value)
    with pytest.raises(StoreError, match=f"session 'a' is damaged: .*{message}"):
        list(store.find("me", "a").tree)  # a body is read when another caller looks at its turn
    assert any(re.search(f"'a' is damaged: .*{message}", text) for text in store.verify())
    assert list(store.find("me", "b").tree)
    store.close()


def test_a_turn_that_keeps_more_than_there_is(filled):
    sealed_again(filled, "keep", 6).close()
    store = sealed_again(filled, "length", 8)
    with pytest.raises(StoreError, match="turn 3 keeps 6 tokens, expected at most 5"):
        store.find("me", "a")
    store.close()


def test_a_damaged_journal_loses_only_what_follows_the_damage(filled):
    edit(filled, "DELETE FROM journal_tokens WHERE number = 7")
    store = SqliteStore(filled)
    record = store.find("me", "c")
    entry = store.unfinished(record)
    assert entry.token_ids == tuple(range(7))
    assert entry.damage == "tokens 7 of its journal are missing"
    assert store.verify() == ["session 'c': its journal is damaged: tokens 7 of its journal are "
                              "missing"]  # fmt: skip
    store.release(store.recover(record))
    store.begin(record, TurnStart(16, 40, 17, {}))  # the session continues
    store.close()


def test_a_refresh_that_meets_damage(filled):
    store = SqliteStore(filled)
    record = store.find("me", "a")
    theirs = SqliteStore(filled)
    changed = theirs.find("me", "a")
    theirs.change(*grow(changed))
    theirs.close()
    edit(filled, "UPDATE turns SET text = 'x' WHERE session = 1 AND id = 18")
    before = fields(record)
    with pytest.raises(StoreError, match="session 'a' is damaged"):
        store.refresh(record)
    assert fields(record) == before
    with pytest.raises(Stale):
        store.change(record)
    store.close()


def test_a_flipped_bit_is_never_read_as_another_session(filled):
    """A flipped bit or a cut in the file results in an error or in the stored sessions."""
    chance = random.Random(1)
    store = SqliteStore(filled)
    expected = {r.name: fields(r) for r in store.records()}
    entry = store.unfinished(store.find("me", "c"))
    store.close()
    whole = (filled / "sessions.db").read_bytes()
    copy = filled.parent / "copy"
    seen = {"wrong": 0, "right": 0, "gone": 0, "file": 0}
    for _ in range(150):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 8))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.1:
            del damaged[chance.randrange(len(damaged)) :]
        (copy / "sessions.db").write_bytes(damaged)
        try:
            store = SqliteStore(copy)
        except StoreError:
            seen["file"] += 1
            continue
        for name in expected:
            try:
                found = store.find("me", name)
                if found is None:
                    seen["gone"] += 1
                    continue
                assert fields(found) == expected[name]
                left = store.unfinished(found) if name == "c" else None
                if left is not None and left != entry:
                    assert left.damage
                    assert left.start in (None, entry.start)
                    assert left.token_ids == entry.token_ids[: len(left.token_ids)]
                seen["right"] += 1
            except StoreError:
                seen["wrong"] += 1
        with contextlib.suppress(StoreError):
            store.summaries(search="words")
            store.summaries()
        store.close()
    assert seen["right"] > 300
    assert seen["wrong"] > 10
    assert seen["gone"] < 20  # an index is damaged: verify() reports it


# --- damaged files ------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"hello " * 1000, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_file_that_is_no_database(data_dir, content):
    data_dir.mkdir()
    (data_dir / "sessions.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"sessions\.db: the file is damaged .* Nothing of it was"):
        SqliteStore(data_dir)
    assert (data_dir / "sessions.db").read_bytes() == content


def test_a_database_of_something_else(data_dir):
    data_dir.mkdir()
    edit(data_dir, "CREATE TABLE cookies (a)")
    with pytest.raises(StoreError, match=r"sessions\.db: the file is a database, but not one of s"):
        SqliteStore(data_dir)


def test_a_newer_version_is_refused(data_dir):
    SqliteStore(data_dir).close()
    newest = len(schema.MIGRATIONS)
    edit(data_dir, f"PRAGMA user_version = {newest + 1}")
    message = f"is of version {newest + 1}, expected at most {newest}: a newer lmchat"
    with pytest.raises(StoreError, match=message):
        SqliteStore(data_dir)


def test_damage_that_is_met_later(filled):
    store = SqliteStore(filled)
    store.close()
    path = filled / "sessions.db"
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), 4096):
        if b"words of a" in data[start : start + 4096]:
            data[start : start + 16] = b"\xff" * 16
    path.write_bytes(data)
    store = SqliteStore(filled)
    with pytest.raises(StoreError, match="put a backup in its place"):
        store.records()
    assert store.verify()
    store.close()
    assert len(path.read_bytes()) == len(data)


# --- migrations ---------------------------------------------------------------------------------


def test_checksums_are_what_they_were():
    assert codec.checksum("abc", 1, None, b"\2") == zlib.crc32(b"3:abc1;None;1:\2")


def test_version_1_becomes_the_newest(data_dir):
    write_version_1(data_dir)
    store = SqliteStore(data_dir)
    expected = [
        user(1, text="Good morning"),
        reply(2, 1, 2, (3, 4, 65541), "and you", finish_reason="stop"),
    ]
    found = store.find("me", "old")
    assert list(found.tree) == expected
    assert (found.id, found.leaf, found.tags, found.revision) == ("abc", 2, ("x",), 5)
    assert [s.snippet for s in store.summaries(search="morning")] == ["Good morning"]
    assert [s.name for s in store.summaries(search="old")] == ["old"]
    assert store.begin(found, TurnStart(2, 5, 3, {})).fencing_token == 13
    assert store.verify() == []
    store.close()


def test_a_text_that_damage_made_a_number_does_not_keep_a_store_from_migrating(data_dir):
    write_version_2(data_dir, [(3, 2, 5, (9,) * 200, "机器学习")])
    types = "UPDATE sqlite_master SET sql = replace(sql, 'text {}', 'text {}') WHERE name = 'turns'"
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(types.format("TEXT", "INTEGER"))
        connection.commit()
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.execute("UPDATE turns SET text = 5 WHERE id = 1")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(types.format("INTEGER", "TEXT"))
        connection.commit()
    with contextlib.closing(SqliteStore(data_dir)) as store:
        assert [one.name for one in store.summaries(search="学习")] == ["old"]
        with pytest.raises(StoreError, match="damaged"):
            store.find("me", "old")


def test_a_migration_of_another_process_is_waited_for(data_dir, monkeypatch):
    write_version_2(data_dir, [])
    SqliteStore(data_dir).close()  # turns the log on
    edit(data_dir, f"PRAGMA user_version = {len(schema.MIGRATIONS) - 1}")
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db", isolation_level=None,
                                            check_same_thread=False)) as other:  # fmt: skip
        other.execute("BEGIN IMMEDIATE")
        other.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS)}")
        ends = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        ends.start()
        SqliteStore(data_dir).close()
        ends.join()


def test_a_migration_that_fails_changes_nothing(data_dir, monkeypatch):
    write_version_1(data_dir)
    before = everything(data_dir)
    first, *others = schema.MIGRATIONS
    broken = (first, *((*steps, "CREATE TABLE sessions (a);") for steps in others))
    monkeypatch.setattr(schema.migrate, "__defaults__", (broken,))
    with pytest.raises(StoreError, match="already exists"):
        SqliteStore(data_dir)
    assert everything(data_dir) == before


def everything(data_dir):
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()
        return version, list(connection.iterdump())


# --- the disk -----------------------------------------------------------------------------------


def largest_file(size):
    """Limits the size of files, so that writes fail as on a full disk."""
    return process_limits.lowered(resource.RLIMIT_FSIZE, size)


def test_a_full_disk_changes_nothing_and_reads_go_on(filled):
    store = SqliteStore(filled)
    record = store.find("me", "a")
    lease = store.begin(record, TurnStart(16, 40, 17, {}))
    store.journal([(lease, [1])])
    before = {r.name: fields(r) for r in store.records()}
    record, new = grow(record, "much " * 20000)
    with largest_file((filled / "sessions.db-wal").stat().st_size + 100):
        for act in (
            lambda: store.finish(lease, record, new),
            lambda: store.change(record, new),
            lambda: store.add(talk("more", 3)),
            lambda: store.journal([(lease, [2])]),
            lambda: store.note("x", 1),
            lambda: store.remove(record),
            lambda: store.begin(record, TurnStart(16, 40, 17, {})),
        ):
            with pytest.raises(StoreError, match=r"sessions\.db: the disk .*: nothing was changed"):
                act()
        assert {r.name: fields(r) for r in store.records()} == before
    store.journal([(lease, [3])])
    record = store.finish(lease, record, new)
    assert_same(store.find("me", "a"), record)
    assert store.verify() == []
    store.close()


def test_a_disk_that_was_full_before_can_be_read(filled):
    store = SqliteStore(filled)
    before = {r.name: fields(r) for r in store.records()}
    store.close()
    assert not (filled / "sessions.db-wal").exists()
    with largest_file(4096):  # the index of the log does not fit
        full = SqliteStore(filled)
        assert {r.name: fields(r) for r in full.records()} == before
        assert [one.name for one in full.summaries("me")] == [one.name for one in full.summaries()]
        with pytest.raises(StoreError, match=r"sessions\.db: the disk .*: nothing was changed"):
            full.remove(full.find("me", "a"))
        full.close()
    store = SqliteStore(filled)
    assert {r.name: fields(r) for r in store.records()} == before
    assert store.verify() == []


def test_a_log_on_a_full_disk_is_not_left_out(filled):
    store = SqliteStore(filled)
    changed = store.find("me", "a")
    changed = store.change(*grow(changed))
    log = (filled / "sessions.db-wal").read_bytes()
    store.close()
    for name in ("-wal", "-shm"):
        (filled / f"sessions.db{name}").unlink(missing_ok=True)
    (filled / "sessions.db-wal").write_bytes(log)  # as a death leaves it
    with largest_file(4096), pytest.raises(StoreError, match="the disk"):
        SqliteStore(filled)


def as_other_user(data_dir, act):
    """Returns as text what `act` raises in an unprivileged process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if IS_ROOT:
                os.setgid(65534)
                os.setuid(65534)
            act()
            message = "nothing"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(pid, 0)
    return message


def give_to_other_user(data_dir):
    if IS_ROOT:
        os.chmod(data_dir.parent, 0o755)
        for path in (data_dir, *data_dir.rglob("*")):
            os.chown(path, 65534, 65534)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("what", "bits"), [("sessions.db", 0o400), (".", 0o500)])
def test_a_read_only_file_or_folder(filled, what, bits):
    give_to_other_user(filled)
    before = (filled / "sessions.db").read_bytes()
    (filled / what).chmod(bits)

    def write():
        store = SqliteStore(filled)
        try:
            assert len(store.records()) == 3  # it can still be read
            with pytest.raises(StoreError, match="cannot be written"):
                store.begin(store.find("me", "a"), TurnStart(16, 40, 17, {}))
            with pytest.raises(StoreError, match="cannot be written"):
                store.note("x", 1)
            store.add(talk())
        finally:
            store.close()

    message = as_other_user(filled, write)
    assert message.startswith("StoreError: the store"), message
    assert "sessions.db: it cannot be written (user " in message
    assert "set LMCHAT_HOME to a folder that can be written" in message
    (filled / what).chmod(0o700)
    assert (filled / "sessions.db").read_bytes() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_older_store_that_cannot_be_written_is_read(data_dir):
    write_version_2(data_dir, [(3, 2, 5, (9,) * 200, "the third")])
    give_to_other_user(data_dir)
    before = (data_dir / "sessions.db").read_bytes()
    data_dir.chmod(0o500)

    def read():
        store = SqliteStore(data_dir)
        try:
            assert len(store.find("me", "old").tree) == 3
            assert [one.snippet for one in store.summaries(search="third")] == ["the third"]
            assert store.verify() == []
            with pytest.raises(StoreError, match="no such table: beginnings"):
                store.common("me", [1, 2])
            with pytest.raises(StoreError, match="it cannot be written"):
                store.add(talk())
        finally:
            store.close()

    assert as_other_user(data_dir, read) == "nothing"
    data_dir.chmod(0o700)
    assert (data_dir / "sessions.db").read_bytes() == before

    def migrate():
        with contextlib.closing(SqliteStore(data_dir)) as store:
            assert store.common("me", [1, 2, 3, 4, 65541, *[9] * 200]).pages == 3

    assert as_other_user(data_dir, migrate) == "nothing"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use the folder"):
        SqliteStore(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot use the folder"):
        SqliteStore(tmp_path / "file" / "below")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read(data_dir):
    old = os.umask(0)
    try:
        store = SqliteStore(data_dir)
        store.add(talk())
        store.begin(store.find("me", "talk"), TurnStart(2, 5, 3, {}))
    finally:
        os.umask(old)
    assert mode(data_dir) == mode(data_dir / "owners") == 0o700
    files = [path for path in data_dir.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {mode(path) for path in files} == {0o600}
    data_dir.chmod(0o755)
    (data_dir / "sessions.db").chmod(0o664)
    (data_dir / "sessions.db-wal").chmod(0o644)
    again = SqliteStore(data_dir)
    assert mode(data_dir) == 0o700
    assert mode(data_dir / "sessions.db") == mode(data_dir / "sessions.db-wal") == 0o600
    again.close()
    store.close()


def test_a_folder_with_other_things_keeps_its_mode(data_dir):
    data_dir.mkdir(mode=0o755)
    data_dir.chmod(0o755)
    (data_dir / "letter.txt").write_text("")
    SqliteStore(data_dir).close()
    assert mode(data_dir) == 0o755
    assert mode(data_dir / "sessions.db") == 0o600


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
def test_files_of_another_user(filled):
    os.chown(filled / "sessions.db", 12345, 12345)
    with pytest.raises(StoreError, match=r"sessions\.db belongs to user 12345, expected 0"):
        SqliteStore(filled)
    os.chown(filled, 12345, 12345)
    with pytest.raises(StoreError, match=r"data belongs to user 12345, expected 0"):
        SqliteStore(filled)


# --- where it is --------------------------------------------------------------------------------


def test_data_directory_is_where_the_variables_say(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "given"))
    assert data_directory.data_dir() == tmp_path / "given"
    assert mode(tmp_path / "given") == 0o700
    monkeypatch.delenv("LMCHAT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_directory.data_dir() == tmp_path / "xdg" / "lmchat"
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_directory.data_dir() == tmp_path / "user" / ".local" / "share" / "lmchat"
    monkeypatch.setenv("XDG_DATA_HOME", "")
    assert data_directory.data_dir() == tmp_path / "user" / ".local" / "share" / "lmchat"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert data_directory.data_dir() == tmp_path / "user" / ".local" / "share" / "lmchat"
    monkeypatch.setenv("LMCHAT_HOME", "~/mine")
    assert data_directory.data_dir() == tmp_path / "user" / "mine"


@pytest.mark.parametrize("given", [{}, {"LMCHAT_HOME": "~/x"}, {"XDG_DATA_HOME": "relative"}])
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, given):
    def unknown(_user):
        raise KeyError("no entry in the list of users")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "LMCHAT_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"^user \d+ has no home directory .*; set LMCHAT_HOME to"):
        data_directory.data_dir()


def test_a_folder_that_cannot_be_used_is_named_with_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path / "file" / "data"))
    words = f"cannot use the folder {tmp_path}/file/data: File exists; set LMCHAT_HOME to"
    with pytest.raises(StoreError, match=f"^{re.escape(words)} another$"):
        data_directory.data_dir()
