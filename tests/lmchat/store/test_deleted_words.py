"""Nothing of a deleted session is left in the files of the store, soon after the deletion."""

import os
import signal

import pytest
from stores import another_owner, grow, home_in_memory, opened_store, talk  # noqa: F401 - fixtures

from lmchat.store.records import TurnStart
from lmchat.store.sqlite import checkpointer, codec
from lmchat.store.sqlite.sqlite_store import SqliteStore

WORDS = ("Quillfeather", "umbrellas")
IDS = tuple(range(40_001, 40_020))


def secret(name="Quillfeather's"):
    record = talk(name, 1, "Where are the violet umbrellas of Quillfeather? " * 20)
    record, turns = grow(record, "And the umbrellas?")
    turn = turns[1].__class__(
        **{**vars(turns[1]), "token_ids": IDS, "length": turns[1].length + 16}
    )
    return record.changed(
        [turn], own_title="Umbrellas", metadata={"of": "Quillfeather"}, settings={"stop": WORDS}
    )


def left(data_dir):
    """Files that have a word in any case, or the token ids."""
    needles = [word.lower().encode() for word in WORDS] + [codec.pack_tokens(IDS)[1:]]
    found = []
    for path in sorted(data_dir.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if any(needle in data or needle in data.lower() for needle in needles):
            found.append(path.name)
    return found


@pytest.fixture
def at_once(monkeypatch):
    """Cleans up right after a deletion."""
    monkeypatch.setattr(checkpointer, "DELETED_SECONDS", 0.0)
    monkeypatch.setattr(checkpointer, "_SHARE", 0)


def cleaned(store):
    """Waits until the thread that cleans up has ended."""
    while (thread := store._database._checkpointer._thread) is not None:
        thread.join()


@pytest.fixture
def quick(at_once, data_dir):
    store = SqliteStore(data_dir)
    yield store
    store.close()


def test_while_the_store_is_open(quick, data_dir):
    for i in range(20):
        quick.add(talk(f"other{i}", 2))
    record = quick.add(secret())
    record = quick.rename(record, "Quillfeather again")
    quick.add(talk("later", 2))
    assert left(data_dir)
    quick.remove(record)
    cleaned(quick)
    assert left(data_dir) == []
    assert (data_dir / "sessions.db-wal").stat().st_size < 32 << 10
    assert quick.verify() == []
    assert len(quick.summaries("me", search="hi")) == 21
    assert quick.summaries("me", search="umbrellas") == []


def test_a_journal_goes_too(quick, data_dir):
    record = quick.add(talk())
    asked = grow(talk("x", 0), "Where is Quillfeather?")[1][0]
    lease = quick.begin(record, TurnStart(record.leaf, 5, 9, {}, asked))
    quick.journal([(lease, IDS)])
    assert left(data_dir)
    quick.remove(record)
    cleaned(quick)
    assert left(data_dir) == []


def test_a_reader_delays_it(quick, data_dir):
    """It waits for readers of the old state, and nothing waits for it."""
    record = quick.add(secret())
    with quick._database.reading() as connection:
        connection.execute("SELECT count(*) FROM turns").fetchone()
        quick.remove(record)
        assert not quick._database._forget()
        quick.add(talk("meanwhile"))
    cleaned(quick)
    assert left(data_dir) == []


def test_at_the_end_of_the_store(data_dir, other):
    """Also if another process has it open, and in a short command."""
    store = SqliteStore(data_dir)
    store.remove(store.add(secret()))
    store.close()
    assert left(data_dir) == []
    assert other.summaries() == []


def test_after_a_process_that_was_killed(data_dir, at_once):
    store = SqliteStore(data_dir)
    store.add(talk("other", 2))
    record = store.add(secret())
    store.close()
    child = os.fork()
    if child == 0:
        checkpointer.DELETED_SECONDS = 1000.0
        store = SqliteStore(data_dir)
        store.remove(store.find("me", record.name))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert left(data_dir)
    store = SqliteStore(data_dir)
    cleaned(store)
    assert left(data_dir) == []
    assert [one.name for one in store.summaries("me")] == ["other"]
    store.close()


def test_many_deletions_share_the_work(data_dir, monkeypatch):
    monkeypatch.setattr(checkpointer, "DELETED_SECONDS", 1000.0)
    store = SqliteStore(data_dir)
    calls = []
    forget = store._database._checkpointer._forget
    monkeypatch.setattr(
        store._database._checkpointer, "_forget", lambda: calls.append(1) or forget()
    )
    for i in range(5):
        store.remove(store.add(secret(f"n{i}")))
    store.close()
    assert (calls, left(data_dir)) == ([1], [])
