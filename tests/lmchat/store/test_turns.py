"""The durable store through a turn: leases, the journal, and what a dead owner left."""

import os
import threading

import pytest
from stores import another_owner, assert_same, grow, home_in_memory, opened_store, reply, talk, user  # noqa: F401 - fixtures

from lmchat.errors import InvalidRequest, SessionBusy
from lmchat.store.protocol import Stale
from lmchat.store.records import JournalEntry, TurnStart
from lmchat.store.sqlite.sqlite_store import SqliteStore


def test_a_turn_is_journalled_then_acknowledged(store, other):
    record = talk(turns=0)
    record = store.add(record)
    start = TurnStart(None, 0, 2, {"seed": 2**64 - 1, "logit_bias": {1: 2.0}}, user(1))
    lease = store.begin(record, start)
    assert lease.session == record.id
    store.journal([(lease, [7])])
    store.journal([(lease, (8, 2**40)), (lease, [])])
    store.sync()
    theirs = other.find("me", "talk")
    busy = f"session 'talk' is generating in process {os.getpid()}"
    for act in (
        lambda: other.begin(theirs, start),
        lambda: other.recover(theirs),
        lambda: other.change(theirs),
        lambda: other.remove(theirs),
    ):
        with pytest.raises(SessionBusy, match=busy):
            act()
    assert other.unfinished(theirs) is None
    assert store.unfinished(record) is None
    assert other.summaries()[0].busy == f"process {os.getpid()}"
    record = store.finish(lease, *grow(record))
    assert other.summaries()[0].busy  # until what was computed is written too
    store.release(lease)
    store.release(lease)
    assert other.summaries()[0].busy == ""
    assert other.unfinished(theirs) is None
    theirs = other.refresh(theirs)
    assert_same(theirs, record)
    assert other.begin(theirs, TurnStart(2, 5, 3, {})).fencing_token == lease.fencing_token + 1


def test_a_turn_of_which_nothing_came(store, other):
    record = talk()
    record = store.add(record)
    lease = store.begin(record, TurnStart(2, 5, 4, {}, user(3, 2, prefix_length=5)))
    store.journal([(lease, [1])])
    store.release(lease)
    assert other.unfinished(other.find("me", "talk")) is None
    assert record.revision == 1


def test_what_a_dead_owner_left(store, other, data_dir):
    record = talk()
    record = store.add(record)
    asked = user(3, 2, "asked", prefix_length=5)
    start = TurnStart(2, 5, 4, {"seed": 1}, asked, metadata={"key": {"at": 1}})
    lease = store.begin(record, start)
    store.journal([(lease, [1]), (lease, [2, 3])])
    store.close()  # frees the lock, as the kernel does for the dead
    theirs = other.find("me", "talk")
    assert other.unfinished(theirs) == JournalEntry(start, (1, 2, 3))
    assert other.summaries()[0].busy == ""
    taken = other.recover(theirs)
    assert taken.fencing_token > lease.fencing_token
    assert other.unfinished(theirs) is None  # its owner lives
    other.journal([(taken, [4])])
    for skip, left in ((0, (1, 2, 3, 4)), (1, (2, 3, 4)), (2, (4,)), (3, ()), (9, ())):
        found = other.unfinished(theirs, living=True, skip=skip)  # as its followers read it
        assert found == JournalEntry(start, left)
        assert (found.fencing_token, found.entries) == (taken.fencing_token, max(3, skip))
    other.close()
    third = SqliteStore(data_dir)
    theirs = third.find("me", "talk")
    assert third.unfinished(theirs).token_ids == (1, 2, 3, 4)
    last = third.recover(theirs)
    turns = [start.user, reply(4, 3, 7, (1, 2, 3, 4), finish_reason="interrupted")]
    theirs = third.finish(last, theirs.changed(turns, leaf=4), turns)
    third.release(last)
    assert third.unfinished(theirs) is None
    assert_same(third.find("me", "talk"), theirs)
    third.close()


def test_begin_leaves_a_dead_owners_journal_to_recover(store, other):
    record = talk()
    record = store.add(record)
    lease = store.begin(record, TurnStart(2, 5, 3, {}))
    store.journal([(lease, [1])])
    store.close()
    theirs = other.find("me", "talk")
    with pytest.raises(Stale, match="a reply of a process that died"):
        other.begin(theirs, TurnStart(2, 5, 9, {}))
    assert other.unfinished(theirs) == JournalEntry(TurnStart(2, 5, 3, {}), (1,))
    theirs = other.finish(other.recover(theirs), theirs, [])
    other.journal([(other.begin(theirs, TurnStart(2, 5, 9, {})), [5])])
    other.close()
    opened = SqliteStore(other.data_dir)
    assert opened.unfinished(theirs) == JournalEntry(TurnStart(2, 5, 9, {}), (5,))
    opened.close()


def test_a_lease_that_was_taken_over(store):
    record, second = talk(), talk("second")
    record = store.add(record)
    second = store.add(second)
    old = store.begin(record, TurnStart(2, 5, 3, {}))
    new = store.begin(record, TurnStart(2, 5, 3, {}))
    beside = store.begin(second, TurnStart(2, 5, 3, {}))
    assert new.fencing_token == old.fencing_token + 1
    with pytest.raises(Stale, match="taken over"):
        store.journal([(old, [1]), (beside, [2]), (new, [3])])
    with pytest.raises(Stale, match="taken over"):
        store.finish(old, record, [])
    with pytest.raises(Stale, match="taken over"):
        store.finish(beside, record, [])
    store.release(old)
    store.close()
    opened = SqliteStore(store.data_dir)
    assert opened.unfinished(record).token_ids == (3,)
    assert opened.unfinished(second).token_ids == (2,)
    opened.close()


def test_the_owner_may_change_a_session_that_generates(store):
    record = talk()
    record = store.add(record)
    lease = store.begin(record, TurnStart(2, 5, 4, {}, user(3, 2, prefix_length=5)))
    record = store.change(record.changed(pinned=True))
    store.journal([(lease, [1])])
    record = store.finish(lease, *grow(record))
    store.remove(record)
    with pytest.raises(Stale):
        store.journal([(lease, [1])])
    with pytest.raises(Stale):
        store.finish(lease, record, [])
    store.release(lease)


def test_a_failed_write_changes_nothing(store):
    record, length = talk(), 5
    record = store.add(record)
    lease = store.begin(record, TurnStart(2, length, 4, {}))
    with pytest.raises(InvalidRequest):
        store.journal([(lease, [1]), (lease, [-1])])
    store.journal([(lease, [2])])
    store.close()
    opened = SqliteStore(store.data_dir)
    assert opened.unfinished(record).token_ids == (2,)
    opened.close()


def test_the_journal_does_not_queue_behind_writers_that_wait(store):
    """Of the durable changes that wait, one at a time asks for the file; the others are behind."""
    record = store.add(talk())
    lease = store.begin(record, TurnStart(2, 5, 3, {}))
    order = []

    def change():
        store.change(record.changed(pinned=True))
        order.append("change")

    waiting = threading.Thread(target=change)
    with store._database._durable_turn:
        waiting.start()
        store.journal([(lease, [1])])
        order.append("journal")
    waiting.join()
    assert order == ["journal", "change"]
