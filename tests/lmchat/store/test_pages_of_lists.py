"""Lists in pages, and sessions by id, in both stores."""

import contextlib
import itertools
import random
import sqlite3
from datetime import datetime, timedelta, timezone

import pytest
from old_stores import write_version_1
from stores import grow, home_in_memory, talk  # noqa: F401 - fixtures

from lmchat.errors import NotFound
from lmchat.store.memory_store import MemoryStore
from lmchat.store.protocol import Stale
from lmchat.store.sqlite.search import Lists
from lmchat.store.sqlite.sqlite_store import SqliteStore

START = datetime(2024, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(params=["disk", "memory"])
def store(request, data_dir):
    opened = SqliteStore(data_dir) if request.param == "disk" else MemoryStore()
    yield opened
    opened.close()


def at(seconds):
    return START + timedelta(seconds=seconds)


def fill(store, count=30, owner="me"):
    for number in range(count):
        tags = tuple(f"t{n}" for n in (2, 3) if number % n == 0)
        text = "a kernel" if number % 5 == 0 else "hi"
        record = talk(f"s{number}", 1, text, last_used=at(number // 2), tags=tags)
        store.add(record.changed(owner=owner))


def pages(store, size, **filters):
    """Returns the names of all pages of a list."""
    found, after = [], None
    while page := store.summaries(limit=size, after=after, **filters):
        assert len(page) <= size
        found.append([one.name for one in page])
        after = page[-1].id
    return found


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"owner": "me"},
        {"owner": "me", "tag": "t3"},
        {"tag": "t2"},
        {"owner": "me", "search": "kernel"},
        {"owner": "me", "search": "kernel", "tag": "t2"},
    ],
)
def test_pages_together_are_the_whole_list(store, filters):
    fill(store)
    fill(store, 7, owner="you")
    whole = [one.name for one in store.summaries(**filters)]
    assert len(whole) > 2
    for size in (1, 4, 100):
        assert list(itertools.chain(*pages(store, size, **filters))) == whole


def test_a_session_used_between_two_pages_hides_no_other(store):
    fill(store)
    chance, clock = random.Random(3), 0
    for _ in range(10):
        before = [one.name for one in store.summaries("me")]
        seen, used, after = [], set(), None
        while page := store.summaries("me", limit=4, after=after):
            seen += [one.name for one in page]
            after = page[-1].id
            record = store.find("me", f"s{chance.randrange(30)}")
            if record.id != after:
                used.add(record.name)
                store.change(*grow(record.changed(last_used=at(100 + clock))))
                clock += 1
        assert [name for name in seen if name not in used] == [n for n in before if n not in used]
        assert len(seen) == len(set(seen))


def test_an_unknown_cursor_and_that_of_another_owner_are_refused_alike(store):
    fill(store, 3)
    theirs = store.summaries("me")[0].id
    for filters in ({}, {"tag": "t2"}, {"search": "hi"}):
        texts = []
        for after in ("0" * 32, theirs):
            with pytest.raises(NotFound) as refused:
                store.summaries("you", after=after, **filters)
            texts.append(str(refused.value).replace(after, "ID"))
        assert texts[0] == texts[1]
    missing = store.find("me", "s1")
    with pytest.raises(NotFound, match="to continue the list after"):
        store.summaries("me", search="kernel", after=missing.id)  # the search does not find it


def test_a_session_is_found_by_owner_and_id(store):
    fill(store, 3)
    record = store.find("me", "s1")
    assert store.find_by_id("me", record.id).name == "s1"
    assert store.find_by_id("you", record.id) is None
    assert store.find_by_id("me", "0" * 32) is None
    store.rename(record, "other")
    assert store.find_by_id("me", record.id).name == "other"


def test_the_revision_rises_with_every_change(store):
    record = store.add(talk("a"))
    seen = [store.summaries()[0].revision]
    for change in (
        lambda record: store.change(*grow(record)),
        lambda record: store.change(record.changed(metadata={"k": "v"})),
        lambda record: store.rename(record, "b"),
    ):
        record = change(record)
        assert (
            record.revision
            == store.summaries()[0].revision
            == store.find("me", record.name).revision
        )
        seen.append(record.revision)
    assert seen == sorted(set(seen))
    assert store.summaries()[0].metadata == record.metadata == {"k": "v"}


def test_a_rename_makes_no_writer_stale(store):
    record = store.add(talk("a"))
    store.rename(store.find("me", "a"), "b")
    record = store.change(record.changed(pinned=True))
    assert (record.name, record.revision) == ("b", store.find("me", "b").revision)
    with pytest.raises(Stale):
        store.change(store.find("me", "b").changed(revision=1))


def test_numbers_follow_the_highest_one(store):
    for name in ("chat-9", "chat-10", "chat-2x", "chat-007", "chat-1e3", "chat-"):
        store.add(talk(name))
    if isinstance(store, SqliteStore):
        assert store.add_numbered(talk("")).name == "chat-11"
        assert store.add_numbered(talk("").changed(owner="you")).name == "chat-1"


def test_a_page_is_read_from_an_index(data_dir):
    """The plan of each list has no sort: it reads as many rows as it returns."""
    store = SqliteStore(data_dir)
    fill(store)
    plans = []
    with store._database.reading() as connection:

        def trace(statement):
            if "FROM sessions AS s LEFT" in statement or "FROM session_tags" in statement:
                plans.append(statement)

        connection.set_trace_callback(trace)
        lists, after = Lists(connection, lambda _: ""), store.summaries("me")[5].id
        for tag in (None, "t2"):
            for last in (None, after):
                lists.newest("me", tag, 3, last)
        connection.set_trace_callback(None)
        assert len(plans) == 4
        for statement in plans:
            steps = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            words = " ".join(step[3].decode() for step in steps)
            assert "TEMP B-TREE" not in words, words
            assert "USING INDEX sessions_by_owner" in words or "PRIMARY KEY (tag=" in words, words
    store.close()


def test_an_older_process_keeps_the_table_of_tags(data_dir):
    """It writes `sessions` as it always did; triggers do the rest."""
    write_version_1(data_dir)
    store = SqliteStore(data_dir)
    assert [one.name for one in store.summaries("me", tag="x")] == ["old"]
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as older:
        older.execute("UPDATE sessions SET tags = CAST('[\"y\"]' AS BLOB), used_at = 5")
        older.commit()
        found = older.execute("SELECT tag, used_at FROM session_tags").fetchall()
        assert found == [("y", 5)]
        older.execute("UPDATE sessions SET tags = x'ff00'")  # damaged
        older.execute("DELETE FROM sessions")
        older.commit()
        assert older.execute("SELECT count(*) FROM session_tags").fetchone() == (0,)
    store.close()


def test_verify_repairs_the_table_of_tags(data_dir):
    store = SqliteStore(data_dir)
    fill(store, 4)
    with store._database.writing() as connection:
        connection.execute("DELETE FROM session_tags WHERE tag = 't3'")
    assert store.summaries(tag="t3") == []
    (problem, _second) = store.verify()
    assert "the table of tags does not match its tags; it was repaired" in problem
    assert store.verify() == []
    assert [one.name for one in store.summaries(tag="t3")] == ["s3", "s0"]
    store.close()
