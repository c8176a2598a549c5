"""Random work of two stores on one data directory, compared with a dictionary as the model."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import stores
from stores import fields, user

from lmchat.errors import InvalidRequest, NotFound, SessionBusy
from lmchat.store.protocol import Stale
from lmchat.store.records import JournalEntry, Lease, SessionRecord, TurnStart
from lmchat.store.sqlite import sqlite_store
from lmchat.store.sqlite.sqlite_store import SqliteStore

NAMES = ["a", "b", "c"]


@dataclasses.dataclass
class Expected:
    """A session in the model. `changed` is the revision that makes other writers stale."""

    record: SessionRecord
    changed: int = 1
    holder: int | None = None
    lease: Lease | None = None
    journal: JournalEntry | None = None


class World:
    """Two stores, what each has read, and what must be there."""

    def __init__(self, data_dir):
        self.data_dir = data_dir
        self.stores = [SqliteStore(data_dir), SqliteStore(data_dir)]
        self.views: list[dict[str, SessionRecord]] = [{}, {}]  # by id, also of deleted ones
        self.leases: list[dict[str, tuple[Lease, TurnStart]]] = [{}, {}]
        self.model: dict[str, Expected] = {}

    def try_(self, act: Callable[[], object], *expected):
        """Returns the result of `act`, or None if it raised the expected error."""
        kinds = tuple(kind for kind in expected if kind)
        try:
            found = act()
        except kinds:
            return None
        assert not kinds, f"expected {kinds}"
        return found if found is not None else True

    def view(self, who, number) -> SessionRecord | None:
        views = list(self.views[who].values())
        return views[number % len(views)] if views else None

    def named(self, name) -> bool:
        return any(stored.record.name == name for stored in self.model.values())

    # --- verbs: `who` is a store, `number` chooses ------------------------------------------

    def add(self, who, number):
        record = stores.talk(NAMES[number % 3], number % 4, f"words {number}")
        taken = InvalidRequest if self.named(record.name) else None
        if added := self.try_(lambda: self.stores[who].add(record), taken):
            self.added(who, added)

    def add_numbered(self, who, number):
        record = stores.talk(NAMES[number % 3] if number % 2 else "", 1)
        taken = not record.name or self.named(record.name)
        record = self.stores[who].add_numbered(record)
        assert record.name.startswith("chat-") == taken
        self.added(who, record)

    def added(self, who, record):
        self.views[who][record.id] = record
        self.model[record.id] = Expected(record)

    def find(self, who, number):
        name = NAMES[number % 3]
        found = self.stores[who].find("me", name)
        assert (found is not None) == self.named(name)
        if found is not None:
            assert fields(found) == fields(self.model[found.id].record)
            self.views[who][found.id] = found

    def refresh(self, who, number):
        record = self.view(who, number)
        if record is None:
            return
        stored = self.model.get(record.id)
        found = self.try_(lambda: self.stores[who].refresh(record), None if stored else NotFound)
        if found:
            assert (found is record) == (record.revision == stored.record.revision)
            assert fields(found) == fields(stored.record)
            self.views[who][record.id] = found

    def rename(self, who, number):
        record, name = self.view(who, number), NAMES[number % 3]
        if record is None:
            return
        stored = self.model.get(record.id)
        wrong = NotFound if stored is None else InvalidRequest if self.named(name) else None
        if renamed := self.try_(lambda: self.stores[who].rename(record, name), wrong):
            revision = stored.record.revision + 1
            current = record.revision == stored.record.revision
            stored.record = stored.record.changed(name=name, revision=revision)
            assert renamed.revision == (revision if current else record.revision)
            self.views[who][record.id] = renamed

    def refusal(self, who, record, *, check_stale=True):
        stored = self.model.get(record.id)
        if stored is None:
            return NotFound
        if stored.holder not in (None, who) and stored.journal is not None:
            return SessionBusy
        return Stale if check_stale and record.revision < stored.changed else None

    def change(self, who, number):
        record = self.view(who, number)
        if record is None:
            return
        refusal = self.refusal(who, record)
        tried, made = self.edit(record, number)
        if changed := self.try_(lambda: self.stores[who].change(tried, made), refusal):
            self.stored(who, changed)

    def edit(self, record, number):
        ids = [turn.id for turn in record.tree]
        if number % 3 == 0:
            return record.changed(leaf=[None, *ids][number % (len(ids) + 1)]), []
        if number % 5 == 1 and record.leaf is not None:  # a reply grows in place
            turn = record.tree.get(record.leaf)
            if not record.tree.children(turn.id):
                more = (*turn.token_ids, number)
                grown = dataclasses.replace(turn, token_ids=more, length=turn.length + 1)
                return record.changed([grown]), [grown]
        if number % 3 == 1:
            settings = {"seed": number, "logit_bias": {number: 1.0}}
            record = record.changed(settings=settings, tags=(str(number),))
        return stores.grow(record, f"words {number}")

    def stored(self, who, record):
        self.views[who][record.id] = self.model[record.id].record = record
        self.model[record.id].changed = record.revision

    def remove(self, who, number):
        record = self.view(who, number)
        if record is None or number % 3:
            return
        refusal = self.refusal(who, record, check_stale=False)
        if self.try_(lambda: self.stores[who].remove(record), refusal):
            del self.model[record.id]

    def begin(self, who, number):
        record = self.view(who, number)
        if record is None:
            return
        length = record.tree.get(record.leaf).length if record.leaf else 0
        asked = user(record.tree.new_id(), record.leaf, "asked", length)
        start = TurnStart(record.leaf, length, record.tree.new_id(), {"seed": number}, asked)
        refusal, stored = self.refusal(who, record), self.model.get(record.id)
        if refusal is None and stored.holder is None and stored.journal is not None:
            refusal = Stale  # a dead owner's journal: recover() first
        lease = self.try_(lambda: self.stores[who].begin(record, start), refusal)
        if lease:
            stored = self.model[record.id]
            assert stored.lease is None or lease.fencing_token > stored.lease.fencing_token
            stored.holder, stored.lease, stored.journal = who, lease, JournalEntry(start, ())
            self.leases[who][record.id] = lease, start

    def newest(self, who, number):
        """A lease that the store has, or had, and whether it counts."""
        if not self.leases[who]:
            return None
        key = list(self.leases[who])[number % len(self.leases[who])]
        lease, start = self.leases[who][key]
        stored = self.model.get(key)
        good = stored is not None and stored.holder == who and stored.lease == lease
        return key, lease, start, stored, good

    def journal(self, who, number):
        found = self.newest(who, number)
        if found is None:
            return
        _, lease, _, stored, good = found
        tokens = list(range(number, number + number % 4))
        act = lambda: self.stores[who].journal([(lease, tokens)])  # noqa: E731
        if self.try_(act, None if good else Stale) == [] and stored.journal is not None:
            entry = stored.journal
            stored.journal = dataclasses.replace(entry, token_ids=(*entry.token_ids, *tokens))

    def finish(self, who, number):
        found = self.newest(who, number)
        if found is None or found[0] not in self.views[who]:
            return
        key, lease, _, stored, good = found
        record = self.views[who][key]
        stale = not good or record.revision < stored.changed
        tried, made = stores.grow(record, f"words {number}")
        finish = lambda: self.stores[who].finish(lease, tried, made)  # noqa: E731
        if finished := self.try_(finish, Stale if stale else None):
            self.stored(who, finished)
            stored.journal = None

    def release(self, who, number):
        found = self.newest(who, number)
        if found is not None:
            key, lease, _, stored, good = found
            self.stores[who].release(lease)
            del self.leases[who][key]
            if good:
                stored.holder = stored.journal = None

    def recover(self, who, number):
        record = self.view(who, number)
        if record is None:
            return
        refusal = self.refusal(who, record, check_stale=False)
        stored = self.model.get(record.id)
        if stored is not None:
            if stored.holder not in (None, who):
                refusal = SessionBusy
            entry = self.stores[who].unfinished(record)
            assert entry == (stored.journal if stored.holder is None else None)
        lease = self.try_(lambda: self.stores[who].recover(record), refusal)
        if lease:
            stored.holder, stored.lease = who, lease
            self.leases[who][record.id] = lease, TurnStart(None, 0, 0, {})

    def reopen(self, who, number):
        if number % 3 == 0:
            self.stores[who].close()
            self.stores[who] = SqliteStore(self.data_dir)
            self.views[who], self.leases[who] = {}, {}
            for stored in self.model.values():
                if stored.holder == who:
                    stored.holder = None

    # --- the end -----------------------------------------------------------------------------

    def check(self):
        expected = {key: fields(stored.record) for key, stored in self.model.items()}
        for store in self.stores:
            assert {record.id: fields(record) for record in store.records()} == expected
            busy = {s.id for s in store.summaries() if s.busy}
            assert busy == {key for key, stored in self.model.items() if stored.holder is not None}
        for store, views in zip(self.stores, self.views, strict=True):
            for key in views.keys() & self.model.keys():
                views[key] = store.refresh(views[key])
                assert fields(views[key]) == expected[key]
        self.close()
        self.stores = [SqliteStore(self.data_dir)]
        for record in self.stores[0].records():
            assert self.stores[0].unfinished(record) == self.model[record.id].journal
        assert self.stores[0].verify() == []
        words = {s.id for s in self.stores[0].summaries(search="words")}
        with_words = {
            key
            for key, stored in self.model.items()
            if any("words" in turn.text for turn in stored.record.tree)
        }
        assert words == with_words

    def close(self):
        for store in self.stores:
            store.close()


VERBS = [
    "add", "add_numbered", "find", "refresh", "refresh", "rename", "change", "change", "remove",
    "begin", "begin", "journal", "journal", "finish", "release", "recover", "reopen",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_two_stores_against_a_model(seed, monkeypatch):
    monkeypatch.setattr(sqlite_store, "RELEASE_SECONDS", 0.0)  # nobody releases meanwhile
    chance = random.Random(seed)
    for _ in range(3):
        with stores.folder() as folder:
            world = World(folder / "data")
            try:
                for _ in range(150):
                    verb = chance.choice(VERBS)
                    getattr(world, verb)(chance.randrange(2), chance.randrange(1000))
                world.check()
            finally:
                world.close()
