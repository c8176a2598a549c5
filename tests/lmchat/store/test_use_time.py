"""Ages count the time in which a store was in use, and the last use only rises."""

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from stores import another_owner, grow, home_in_memory, opened_store, talk  # noqa: F401 - fixtures

from lmchat.store import records, use_time
from lmchat.store.memory_store import MemoryStore
from lmchat.store.records import TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.use_time import UseTime

DAY = 86400.0


class Clock:
    """Two clocks that tests set: one that only rises, and one that is right or wrong."""

    def __init__(self, monkeypatch):
        self.seconds, self.wall = 0.0, datetime(2026, 5, 1, tzinfo=timezone.utc)
        monkeypatch.setattr(records, "datetime", SimpleNamespace(now=lambda _zone: self.wall))
        monkeypatch.setattr(records, "_latest", datetime.min.replace(tzinfo=timezone.utc))

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def use(store, record):
    """Stores a turn, as its end does."""
    lease = store.begin(record, TurnStart(record.leaf, 1, 99, {}))
    record, turns = grow(record)
    record = store.finish(lease, record.changed(last_used=records.now()), turns)
    store.release(lease)
    return record


def order(store):
    return [one.name for one in store.summaries()]


def unused(store, counter, days):
    oldest = counter.unused_since(days * DAY)
    return {one.name for one in store.summaries() if oldest and one.last_used <= oldest}


def test_only_time_in_use_counts(store, clock):
    counter = UseTime(store, clock)
    store.add(talk("old"))
    counter.mark()
    for days in range(1, 30):
        clock.wall += timedelta(days=days * 100)  # nothing depends on it
        clock.seconds += DAY
        counter.mark()
    store.add(talk("new"))
    assert unused(store, counter, 30) == set()
    clock.seconds += DAY
    counter.mark()
    assert unused(store, counter, 30) == {"old"}
    clock.seconds += 100 * DAY  # in which no process has the store open
    assert unused(store, UseTime(store, clock), 30) == {"old"}


def test_processes_count_once(store, other, clock):
    counters = [UseTime(store, clock), UseTime(other, clock)]
    store.add(talk("old"))
    for hour in range(48):
        clock.seconds += 3600
        counters[hour % 2].mark()
    assert store.noted("use")["seconds"] == pytest.approx(2 * DAY, abs=7200)
    again = UseTime(store, clock)  # a restart counts the time before it once
    again.mark()
    assert store.noted("use")["seconds"] <= 2 * DAY


def test_another_start_of_the_machine(store, clock, monkeypatch):
    """Its clock begins again, and cannot be compared with the one before."""
    clock.seconds = 1000 * DAY
    counter = UseTime(store, clock)
    clock.seconds += DAY
    counter.mark()
    monkeypatch.setattr(use_time, "_boot", lambda: "another")
    clock.seconds = 0.0
    counter = UseTime(store, clock)
    clock.seconds = DAY
    counter.mark()
    assert store.noted("use")["seconds"] == 2 * DAY


def test_a_damaged_note_begins_again(store, clock):
    store.add(talk("old"))
    for note in (None, [], {"seconds": "x"}, {"marks": [[1]]}, {"marks": [[1, "x"]]}):
        store.note("use", note)
        UseTime(store, clock).mark()
        assert store.noted("use")["seconds"] == 0.0


def test_marks_do_not_grow(store, clock):
    counter = UseTime(store, clock)
    store.add(talk("old"))
    for _ in range(40):
        clock.seconds += DAY / 2
        counter.mark()
        counter.unused_since(3 * DAY)
    assert len(store.noted("use")["marks"]) < 3 * 2 + 3


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_session_used_last_is_the_first(clock, data_dir, kind):
    """Whatever the clock does, also between two processes."""
    store = MemoryStore() if kind == "memory" else SqliteStore(data_dir)
    sessions = {name: store.add(talk(name)) for name in "abcd"}
    for days, name in ((0, "a"), (40, "b"), (-2, "c"), (-3, "a"), (1, "d"), (0, "b")):
        clock.wall = datetime(2026, 5, 1, tzinfo=timezone.utc) + timedelta(days=days)
        sessions[name] = use(store, sessions[name])
        assert order(store)[0] == name
        if kind == "disk":
            store.close()
            records._latest = datetime.min.replace(tzinfo=timezone.utc)  # a new process
            store = SqliteStore(data_dir)
        fresh = store.add_numbered(talk(""))
        assert order(store)[:2] == [fresh.name, name]
    assert sessions["b"].last_used == store.find("me", "b").last_used
    store.close()


def test_processes_that_see_different_clocks(store, other, clock):
    first, second = store.add(talk("first")), store.add(talk("second"))
    clock.wall += timedelta(days=40)
    first = use(store, first)
    clock.wall -= timedelta(days=41)
    records._latest = clock.wall  # the other process was started now
    second = use(other, second)
    assert second.last_used > first.last_used
    assert order(store) == ["second", "first"]


def test_an_import_keeps_its_place(store, clock):
    store.add(talk("now"))
    store.add(talk("then", last_used=clock.wall - timedelta(days=3)))
    assert order(store) == ["now", "then"]
    kept = store.find("me", "then")
    assert store.change(kept.changed(pinned=True)).last_used == kept.last_used
