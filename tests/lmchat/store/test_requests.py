"""The requests of clients that the last turns of sessions answer."""

import contextlib
import sqlite3
import time
from dataclasses import replace

import pytest
from stores import (
    another_owner,  # noqa: F401 - a fixture
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    opened_store,  # noqa: F401 - a fixture
    talk,
)

from lmchat.errors import NotFound
from lmchat.store.data_directory import DATABASE
from lmchat.store.memory_store import MemoryStore
from lmchat.store.records import TurnStart
from lmchat.store.sqlite import requests, schema
from lmchat.store.sqlite.sqlite_store import SqliteStore

START = TurnStart(2, 5, 3, {})


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, of which tests set the first entry."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture(params=["disk", "memory"])
def any_store(request):
    if request.param == "memory":
        return MemoryStore()
    return request.getfixturevalue("store")


def test_a_request_is_that_of_the_last_turn(any_store, clock):
    record = any_store.add(talk())
    assert any_store.request(record) is None
    lease = any_store.begin(record, START, "digest")
    found = any_store.request(record)
    assert (found.digest, found.turn, found.fencing_token) == ("digest", 3, lease.fencing_token)
    assert (found.state, found.at, found.is_own) == ("open", 1000, True)
    clock[0] = 1100.0
    record = any_store.finish(lease, *grow(record))
    assert any_store.request(record).at == 1100
    any_store.release(lease)
    any_store.begin(record, TurnStart(record.leaf, 5, 9, {}))
    assert any_store.request(record) is None


def test_a_settled_request_stays_so_unless_it_is_opened_again(any_store):
    record = any_store.add(talk())
    token = any_store.begin(record, START, "digest").fencing_token

    def state():
        return any_store.request(record).state

    for change in ("left", "open", "left", "settled"):
        any_store.mark_request(record, token, change)
        assert state() == change
    any_store.mark_request(record, token, "left")
    assert state() == "settled"
    any_store.mark_request(record, token, "left", again=True)
    any_store.mark_request(record, token + 1, "settled")
    assert state() == "left"


def test_equal_requests_are_found_within_their_owner(any_store, clock):
    records = [any_store.add(replace(talk(f"s{i}"), owner=f"o{i // 3}")) for i in range(6)]
    tokens = []
    for number, record in enumerate(records):
        clock[0] += 1
        lease = any_store.begin(record, START, "a" if number != 1 else "b")
        tokens.append(lease.fencing_token)
    found = any_store.equal_requests("o0", "a")
    assert found == [records[2].id, records[0].id]
    any_store.mark_request(records[2], tokens[2], "settled")
    any_store.remove(records[0])
    assert any_store.equal_requests("o0", "a") == []
    assert any_store.equal_requests("o0", "b") == [records[1].id]
    with pytest.raises(NotFound):
        any_store.mark_request(records[0], tokens[0], "left")


def test_a_stop_of_another_process_settles_it(store, other):
    record = store.add(talk())
    lease = store.begin(record, START, "digest")
    seen = other.request(record)
    assert (seen.state, seen.is_own) == ("open", False)
    other.request_stop(record, lease.fencing_token)
    assert other.request(record).state == store.request(record).state == "settled"


def test_the_request_of_a_dead_process_has_the_time_of_its_last_token(data_dir, store, clock):
    dying = SqliteStore(data_dir)
    record = dying.add(talk())
    lease = dying.begin(record, START, "digest")
    for clock[0] in (1010.0, 1020.0):
        dying.journal([(lease, [1])])
    dying.close()
    clock[0] = 5000.0
    record = store.refresh(record)
    assert (store.request(record).state, store.request(record).at) == ("died", 1000)
    record = store.finish(store.recover(record), *grow(record))
    assert (store.request(record).state, store.request(record).at) == ("died", 1020)


def test_a_damaged_request_is_none(data_dir, store):
    record = store.add(talk())
    store.begin(record, START, "digest")
    with contextlib.closing(sqlite3.connect(data_dir / DATABASE)) as connection:
        connection.execute("UPDATE requests SET state = 17, turn = 'x'")
        connection.commit()
    assert store.request(record) is None


def test_a_store_of_the_last_version_gets_the_table(data_dir):
    data_dir.mkdir(mode=0o700)
    path = data_dir / DATABASE
    before = next(i for i, steps in enumerate(schema.MIGRATIONS) if requests.TABLE in steps)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        schema.migrate(connection, schema.MIGRATIONS[:before])
        connection.execute(
            "INSERT INTO journal_tokens (session, number, token_ids) VALUES (1, 0, x'00')"
        )
    store = SqliteStore(data_dir)
    try:
        record = store.add(talk())
        store.journal([(store.begin(record, START, "digest"), [1])])
        assert store.request(record).digest == "digest"
    finally:
        store.close()
