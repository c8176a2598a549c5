"""The store in memory: two engines may use it at once, as two processes use one on disk."""

import dataclasses

import pytest
from stores import assert_same, grow, talk, user

from lmchat.errors import NotFound
from lmchat.store.memory_store import MemoryStore
from lmchat.store.protocol import Stale
from lmchat.store.records import SessionRecord, TurnStart


@pytest.fixture
def store():
    return MemoryStore()


def test_a_stale_record_is_refused_and_refreshed(store):
    record = store.add(talk())
    theirs = store.find("me", "talk")
    record = store.change(*grow(record))
    with pytest.raises(Stale):
        store.change(theirs.changed(own_title="theirs"))
    assert store.refresh(record) is record
    assert_same(store.refresh(theirs), record)


def test_only_the_given_turns_are_stored(store):
    """A store on disk writes no other turn of the tree either."""
    record = store.add(talk())
    record, turns = grow(record.changed([user(9)]))
    assert [turn.id for turn in store.change(record, turns).tree] == [1, 2, *(t.id for t in turns)]


def test_a_turn_leaves_the_turns_of_other_writers(store):
    record = store.add(talk())
    lease = store.begin(record, TurnStart(2, 5, 4, {}))
    theirs = user(record.tree.new_id())
    store.change(record.changed([theirs]), [theirs])
    record = store.finish(lease, *grow(record))
    assert theirs.id in record.tree
    assert_same(store.find("me", "talk"), record)


def test_a_renamed_and_a_removed_session(store):
    record = store.add(talk())
    theirs = store.rename(store.find("me", "talk"), "trip")
    assert store.find("me", "talk") is None
    record = store.change(record.changed(pinned=True))
    assert (record.name, record.pinned) == ("trip", True)
    store.remove(theirs)
    with pytest.raises(NotFound, match="no session 'trip'"):
        store.change(record)
    assert store.records() == []


def test_a_record_cannot_be_assigned_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SessionRecord("talk", "me", "append").leaf = 1
