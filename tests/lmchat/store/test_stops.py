"""Requests of other processes to stop a turn."""

import pytest
from stores import (
    another_owner,  # noqa: F401 - a fixture
    grow,
    home_in_memory,  # noqa: F401 - a fixture
    opened_store,  # noqa: F401 - a fixture
    talk,
)

from lmchat.errors import NotFound
from lmchat.store.records import TurnStart

START = TurnStart(2, 5, 3, {})


@pytest.fixture
def running(store):
    """A session with a running turn of `store`: its record and its lease."""
    record = store.add(talk())
    return record, store.begin(record, START)


def test_the_owner_finds_the_request(store, other, running):
    record, lease = running
    assert store.stops() == store.journal([(lease, [1])]) == []
    other.request_stop(record, lease.fencing_token)
    other.request_stop(record, lease.fencing_token)
    assert store.stops() == store.journal([(lease, [2])]) == [lease]
    assert other.stops() == []


def test_a_request_ends_with_its_turn(store, other, running):
    record, lease = running
    other.request_stop(record, lease.fencing_token)
    record = store.finish(lease, *grow(record))
    assert store.stops() == []
    other.request_stop(record, lease.fencing_token)  # after the end of the turn
    after = store.begin(record, TurnStart(record.leaf, 5, 9, {}))
    other.request_stop(record, lease.fencing_token)  # that turn, not the one after it
    assert store.stops() == []
    other.request_stop(record, after.fencing_token)
    store.release(after)
    assert store.stops() == []


def test_a_request_for_a_deleted_session_is_refused(store, other, running):
    record, lease = running
    other.request_stop(record, lease.fencing_token)
    store.remove(record)
    assert store.stops() == []
    with pytest.raises(NotFound):
        other.request_stop(record, lease.fencing_token)
