"""Pages that sessions share are found without reading the other sessions."""

import dataclasses
import random

import pytest
import stores
from old_stores import write_version_2
from stores import home_in_memory, opened_store  # noqa: F401 - fixtures

from lmchat.store.memory_store import MemoryStore
from lmchat.store.prefixes import PAGE, SharedPrefix
from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite import prefix_table, tables
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn, TurnTree


def shared(token_ids, others):
    """Returns the shared prefix, computed page by page from the transcripts of turns."""
    length = len(token_ids)
    full = length // PAGE * PAGE
    found = SharedPrefix()
    for other, is_end in others:
        pages = (other[:end] for end in range(PAGE, len(other) + 1, PAGE))
        found.pages = max(found.pages, sum(page == token_ids[: len(page)] for page in pages))
        same = [e for e in range(1, 1 + min(length, len(other))) if other[:e] == token_ids[:e]]
        if is_end or len(other) >= PAGE:
            found.first = max([found.first, *(end for end in same if end < PAGE)])
        if is_end and len(other) < full + PAGE:
            found.last = max([found.last, *(end - full for end in same)])
    if length < PAGE:
        found.last = found.first
    start = found.pages * PAGE
    found.ends = {
        len(other)
        for other, is_end in others
        if is_end and start < len(other) < start + PAGE and other == token_ids[: len(other)]
    }
    return found


def all_transcripts(records, owner):
    return [
        (r.tree.token_ids(turn.id), not r.tree.children(turn.id))
        for r in records
        if r.owner == owner
        for turn in r.tree
    ]


class Sessions:
    """Random ones of few tokens, so that they have prefixes in common."""

    def __init__(self, store, seed):
        self.store, self.rng = store, random.Random(seed)
        self.records = []
        most = 1 << 40 if seed % 2 else 2
        self.texts = [
            [self.rng.choice([1, most]) for _ in range(size)] for size in (5, 40, 63, 64, 65, 300)
        ]

    def tokens(self):
        chosen = list(self.rng.choice(self.texts))
        if self.rng.random() < 0.5:
            chosen[self.rng.randrange(len(chosen))] = 7
        return tuple(chosen[: self.rng.choice([1, 30, 64, 1000])])

    def turn(self, record, parent):
        tree = record.tree
        length = 0 if parent is None else tree.get(parent).length
        prefix_length = self.rng.choice(
            [length, length, max(0, length - 1), self.rng.randint(0, length)]
        )
        ids = self.tokens()
        return Turn(
            tree.new_id(), parent, "user", "x", {}, ids, prefix_length, prefix_length + len(ids)
        )

    def step(self):
        verb = self.rng.choice(["new", "new", *["grow"] * 4, "extend", "fork", "delete"])
        if verb == "new" or not self.records:
            owner = self.rng.choice(["me", "you"])
            record = SessionRecord(f"s{self.rng.random()}", owner, "append")
            record = self.store.add(record)
            self.records.append(record)
            return
        record = self.rng.choice(self.records)
        ends = [None, *(turn.id for turn in record.tree)]
        if verb == "grow":
            turns = [self.turn(record, self.rng.choice(ends))]
            turns.append(self.turn(record.changed(turns), turns[0].id))
            self.change(record.changed(turns, leaf=turns[1].id), turns)
        elif verb == "extend" and record.tree.ends():
            old = record.tree.get(self.rng.choice(record.tree.ends()))
            ids = (*old.token_ids, *self.tokens())
            longer = dataclasses.replace(old, token_ids=ids, length=old.prefix_length + len(ids))
            self.change(record.changed([longer]), [longer])
        elif verb == "fork":
            tree = TurnTree.of(record.tree.path(record.leaf))
            other = SessionRecord(f"s{self.rng.random()}", record.owner, "append", tree=tree)
            self.records.append(self.store.add(other))
        elif verb == "delete":
            self.store.remove(record)
            self.records.remove(record)

    def change(self, record, turns):
        place = [one.id for one in self.records].index(record.id)
        self.records[place] = self.store.change(record, turns)

    def queries(self):
        known = all_transcripts(self.records, "me") + all_transcripts(self.records, "you")
        for ids, _is_end in self.rng.sample(known, min(12, len(known))):
            cut = ids[: self.rng.randint(0, len(ids))]
            yield from (ids, cut, [*cut, *self.tokens()])


@pytest.mark.parametrize("seed", range(6))
def test_common_is_what_the_transcripts_say(store, seed):
    sessions = Sessions(store, seed)
    for _ in range(50):
        sessions.step()
    assert len(sessions.records) > 1
    for ids in sessions.queries():
        for owner in ("me", "you"):
            expected = shared(ids, all_transcripts(sessions.records, owner))
            assert store.common(owner, ids) == expected
    assert store.verify() == []


def test_a_store_in_memory_says_the_same():
    sessions = Sessions(MemoryStore(), 7)
    for _ in range(50):
        sessions.step()
    for ids in sessions.queries():
        expected = shared(ids, all_transcripts(sessions.records, "me"))
        assert sessions.store.common("me", ids) == expected


def test_what_a_reply_without_an_end_shares(data_dir, store):
    turn = stores.user(1, ids=(1,) * 70)
    record = stores.talk("begun", 0).changed([turn], leaf=1)
    record = store.add(record)
    asked = stores.user(2, turn.id, prefix_length=70, ids=(2,) * 70)
    lease = store.begin(record, TurnStart(turn.id, 70, 3, {}, asked))
    store.journal([(lease, [3] * 70)])
    ids = [1] * 70 + [2] * 70 + [3] * 70
    assert store.common("me", ids) == SharedPrefix(pages=3, first=63, last=18, ends={210})
    assert store.common("you", ids) == SharedPrefix()
    store.release(lease)
    assert store.common("me", ids) == SharedPrefix(pages=1, first=63, ends={70})


def filled(store, count):
    """Sessions with a system prompt of three pages in common."""
    for number in range(count):
        record = SessionRecord(f"s{number}", "me", "append")
        for ids in ((5,) * 200, (6, number), (7,) * 300):
            length = record.tree.get(record.leaf).length if record.leaf else 0
            turn = Turn(record.tree.new_id(), record.leaf, "user", "", {}, ids, length,
                        length + len(ids))  # fmt: skip
            record = record.changed([turn], leaf=turn.id)
        record = store.add(record)
    return record.tree.token_ids(record.leaf)


def steps_of(store, ids):
    """Steps of SQLite's machine that telling takes."""
    count = [0]
    with store._database.reading() as connection:
        connection.set_progress_handler(lambda: count.__setitem__(0, count[0] + 1), 1)
        found = prefix_table.common(connection, "me", ids)
        connection.set_progress_handler(None, 1)
    return found, count[0]


def test_to_tell_takes_as_long_with_many_sessions_as_with_few(data_dir, monkeypatch):
    took = []
    for count in (3, 160):
        store = SqliteStore(data_dir / str(count))
        ids = filled(store, count)
        found, steps = steps_of(store, ids)
        assert found.pages == len(ids) // PAGE
        store.remove(store.find("me", f"s{count - 1}"))
        monkeypatch.setattr(tables, "load", None)  # no session is read
        assert store.common("me", ids) == SharedPrefix(pages=3, first=63)
        monkeypatch.undo()
        took.append(steps)
        store.close()
    assert took[1] <= took[0] + 50


def test_a_long_session_lies_together_in_the_file(data_dir):
    """Deleting it must fit into the room that is set aside on a full disk."""
    with stores.folder() as folder:
        store = SqliteStore(folder / "data")
        rng = random.Random(3)
        for number in range(40):
            ids = tuple(rng.randrange(50_000) for _ in range(20_000))
            tree = TurnTree.of([Turn(1, None, "user", "", {}, ids, 0, len(ids))])
            record = SessionRecord(f"s{number}", "me", "append", tree=tree, leaf=1)
            record = store.add(record)
        found = prefix_table.change_of(record, record.tree).rows
        marks = sorted(mark for _turn, mark, tokens in found if not tokens)
        assert len(marks) == 20_000 // PAGE
        assert len({mark >> 32 for mark in marks}) == -(-len(marks) // 16)
        store.close()


def test_verify_mends_what_damage_did(store):
    ids = filled(store, 3)
    with store._database.writing() as connection:
        connection.execute("UPDATE beginnings SET mark = mark + 1 WHERE session = 2")
    [problem] = store.verify()
    assert "session 's1': the prefix table does not match its turns; it was repaired" in problem
    assert store.verify() == []
    assert store.common("me", ids).pages == len(ids) // PAGE


# --- older stores --------------------------------------------------------------------------------


def test_an_older_store_gets_its_rows(data_dir):
    added = [(3, 2, 5, (9,) * 200, "机器学习"), (4, 2, 4, (8,) * 100, "GPU")]
    write_version_2(data_dir, added)
    store = SqliteStore(data_dir)
    with store._database.reading() as connection:
        stored = prefix_table.stored(connection, 1)
    assert {turn for turn, _mark, _tokens in stored} == {3, 4}  # the others are no ends
    ids = [1, 2, 3, 4, 65541, *[9] * 200]
    assert store.common("me", ids) == SharedPrefix(pages=3, first=63, last=13, ends={205})
    assert store.common("me", [1, 2, 3, 4, *[8] * 99]) == SharedPrefix(pages=1, first=63, last=39)
    assert [found.snippet for found in store.summaries(search="学习")] == ["机器学习"]
    assert store.verify() == []
    record = store.find("me", "old")
    store.remove(record)
    assert store.common("me", ids) == SharedPrefix()
    assert store.verify() == []
    store.close()
