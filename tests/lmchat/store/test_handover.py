"""The lease of an acknowledged turn passes to another owner before its pages are written."""

import pytest
from stores import (
    another_owner,  # noqa: F401 - a fixture
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    opened_store,  # noqa: F401 - a fixture
    talk,
)

from lmchat.errors import SessionBusy
from lmchat.store.protocol import Stale
from lmchat.store.records import Lease, TurnStart
from lmchat.store.sqlite import sqlite_store

START = TurnStart(2, 5, 3, {})


class Clock:
    """Stands for the module `time`: sleeping takes no time, and calls `during`."""

    def __init__(self):
        self.now, self.sleeps, self.during = 0.0, 0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.sleeps += 1
        self.during()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sqlite_store, "time", clock)
    return clock


def acknowledged(store):
    """A session whose owner has ended a turn and still writes its pages."""
    record = store.add(talk())
    lease = store.begin(record, START)
    store.journal([(lease, [1, 2])])
    return lease, store.finish(lease, *grow(record))


def test_a_release_is_awaited_outside_any_transaction(store, other, clock):
    lease, record = acknowledged(store)
    clock.during = lambda: store.release(lease)  # would wait for a transaction of the other's
    taken = other.begin(record, TurnStart(record.leaf, 5, 9, {}))
    assert clock.sleeps == 1
    assert taken.fencing_token == lease.fencing_token + 1


def test_a_lease_that_stays_is_taken_after_the_wait(store, other, clock):
    lease, record = acknowledged(store)
    taken = other.begin(record, TurnStart(record.leaf, 5, 9, {}))
    assert clock.now == pytest.approx(sqlite_store.RELEASE_SECONDS, abs=0.01)
    store.release(lease)  # too late: it ends nothing
    with pytest.raises(Stale):
        store.journal([(lease, [3])])
    other.journal([(taken, [7])])
    assert store.unfinished(record, living=True).token_ids == (7,)
    with pytest.raises(SessionBusy, match="is generating in process"):
        store.begin(record, TurnStart(record.leaf, 5, 9, {}))


def test_an_acknowledged_turn_stops_no_change(store, other, clock):
    _, record = acknowledged(store)
    changed = other.change(record.changed(pinned=True))
    assert (changed.pinned, clock.sleeps) == (True, 0)
    other.remove(changed)
    assert clock.now == pytest.approx(sqlite_store.RELEASE_SECONDS, abs=0.01)
    assert store.find("me", record.name) is None


def test_a_running_turn_stops_changes(store, other, clock):
    record = store.add(talk())
    store.begin(record, START)
    for verb in (other.change, other.remove):
        with pytest.raises(SessionBusy, match="is generating in process"):
            verb(record)
    assert clock.sleeps == 0


def test_a_running_turn_is_not_awaited(store, other, clock):
    record = store.add(talk())
    store.begin(record, START)
    with pytest.raises(SessionBusy):
        other.begin(record, START)
    assert clock.sleeps == 0


def test_the_own_lease_is_not_awaited(store, clock):
    _, record = acknowledged(store)
    store.begin(record, TurnStart(record.leaf, 5, 9, {}))
    assert clock.sleeps == 0


def test_a_turn_that_was_not_planned_on_the_last_one_is_stale(store, other, clock):
    before = store.add(talk())
    lease = store.begin(before, START)
    store.finish(lease, *grow(before))
    with pytest.raises(Stale):
        other.begin(before, START)
    with pytest.raises(Stale):  # the refused turn has left the lease where it was
        store.journal([(Lease(lease.session, lease.fencing_token + 1), [1])])
    store.journal([(lease, [])])
