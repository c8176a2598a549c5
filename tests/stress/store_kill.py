"""Kills a process with SIGKILL at random moments of its work on the real store.

    python -m tests.stress.store_kill --count 10000 --seed 1

A child, forked from a warm parent, creates, sends, edits, forks, renames, deletes, recovers and
checkpoints, or migrates the file first. Its tokens are scripted. It reports each step through a
pipe before it begins and after the store has returned, which is what a user has seen. After the
kill the store is in the state before or after the interrupted step, and in no other.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import pickle
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lmchat.store.records import Lease, SessionRecord, TurnStart
from lmchat.store.sqlite import checkpointer, database, schema
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn, TurnTree

KILLS_PER_DATA_DIR = 40
LONGEST = 0.020  # seconds from the fork to the kill
MIGRATIONS = 0.05  # of the cases begin with a file of version 1

# So that the log is copied into the file often, by its thread too.
checkpointer.LOG_BYTES, checkpointer._LOG_STEP, database._LOG_LIMIT = 128 << 10, 32 << 10, 16 << 10

World = dict[str, Any]  # session id: (what the session is, what its journal holds)


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def state_of(record: SessionRecord) -> tuple[Any, ...]:
    """Returns what a kill must not change in a session, short enough for a pipe."""
    return record.name, record.leaf, record.pinned, len(record.tree), digest(list(record.tree))


def start_of(start: TurnStart) -> tuple[Any, ...]:
    return start.reply_id, digest(start)


def seen(store: SqliteStore) -> World:
    """Returns the sessions of the store."""
    found = {}
    for record in store.records():
        entry = store.unfinished(record)
        journal = None if entry is None else (start_of(entry.start), entry.token_ids)
        found[record.id] = (state_of(record), journal)
    return found


def tokens_of(record: SessionRecord, turn: int, first: int, count: int) -> tuple[int, ...]:
    """Returns the tokens of the scripted reply."""
    seed = int(record.id[:8], 16) * 1000003 + turn * 9176
    return tuple((seed + i * 40503) % 150_000 for i in range(first, first + count))


@dataclass
class Reply:
    """A generation of the child."""

    record: SessionRecord
    lease: Lease
    start: TurnStart
    tokens: tuple[int, ...] = ()


@dataclass
class Child:
    """Works on the store until it is killed or its steps are done."""

    data_dir: Path
    random: random.Random
    pipe: int
    store: SqliteStore = field(init=False)
    records: dict[str, SessionRecord] = field(default_factory=dict)  # by id

    def report(self, message: object) -> None:
        data = pickle.dumps(message)
        os.write(self.pipe, struct.pack("<I", len(data)) + data)

    @contextlib.contextmanager
    def step(self, after: World, *, durable: bool = True) -> Any:
        self.report(("do", after, durable))
        yield
        self.report(("done",))

    def run(self, steps: int) -> None:
        self.store = SqliteStore(self.data_dir)
        self.records = {record.id: record for record in self.store.records()}
        for record in list(self.records.values()):
            if self.store.unfinished(record) is not None:
                self.resume(record)
        for _ in range(steps):
            self.random.choice(
                (self.create, self.send, self.send, self.send_two, self.give_up, self.move,
                 self.rewrite, self.fork, self.rename, self.remove, self.checkpoint, self.go_on)
            )()  # fmt: skip

    # --- verbs -------------------------------------------------------------------------------

    def pick(self) -> SessionRecord:
        if not self.records:
            self.create()
        return self.random.choice(list(self.records.values()))

    def create(self) -> None:
        record = SessionRecord(f"s{self.random.getrandbits(48)}", "local", "append")
        self.add(record)

    def add(self, record: SessionRecord) -> None:
        with self.step({record.id: (state_of(record), None)}):
            self.records[record.id] = self.store.add(record)

    def begin(self, record: SessionRecord) -> Reply:
        length = record.tree.get(record.leaf).length if record.leaf else 0
        words = " ".join(f"word{self.random.randrange(50)}" for _ in range(8))
        ids = tuple(self.random.randrange(150_000) for _ in range(self.random.randrange(1, 200)))
        message = {"role": "user", "content": words}
        user = Turn(record.tree.new_id(), record.leaf, "user", words, message, ids, length,
                    length + len(ids))  # fmt: skip
        start = TurnStart(record.leaf, length, record.tree.new_id(), {"seed": 2**63}, user)
        with self.step({record.id: (state_of(record), (start_of(start), ()))}):
            lease = self.store.begin(record, start)
        return Reply(record, lease, start)

    def stream(self, *replies: Reply) -> None:
        for _ in range(self.random.randrange(6)):
            new = [
                tokens_of(r.record, r.start.reply_id, len(r.tokens), self.random.randrange(1, 4))
                for r in replies
            ]
            for reply, tokens in zip(replies, new, strict=True):
                reply.tokens += tokens
            after = {
                r.record.id: (state_of(r.record), (start_of(r.start), r.tokens)) for r in replies
            }
            with self.step(after, durable=False):
                self.store.journal(
                    [(r.lease, tokens) for r, tokens in zip(replies, new, strict=True)]
                )
            if self.random.random() < 0.2:
                self.store.sync()
                self.report(("synced",))

    def finish(self, reply: Reply) -> None:
        record, start = reply.record, reply.start
        made = []
        parent, length = start.parent, start.prefix_length
        if start.user is not None:
            made.append(start.user)
            parent, length = start.user.id, start.user.length
        end = length + len(reply.tokens)
        turn = Turn(start.reply_id, parent, "assistant", "answer", {"role": "assistant"},
                    reply.tokens, length, end, settings=start.settings)  # fmt: skip
        made.append(turn)
        record = record.changed(made, leaf=turn.id)
        with self.step({record.id: (state_of(record), None)}):
            self.records[record.id] = self.store.finish(reply.lease, record, made)
        self.store.release(reply.lease)

    def send(self) -> None:
        reply = self.begin(self.pick())
        self.stream(reply)
        self.finish(reply)

    def send_two(self) -> None:
        first, second = self.pick(), self.pick()
        if first is not second:
            replies = self.begin(first), self.begin(second)
            self.stream(*replies)
            self.finish(replies[1])
            self.finish(replies[0])

    def give_up(self) -> None:
        reply = self.begin(self.pick())
        self.stream(reply)
        with self.step({reply.record.id: (state_of(reply.record), None)}, durable=False):
            self.store.release(reply.lease)

    def go_on(self) -> None:
        """Continues a reply in place."""
        record = self.pick()
        turn = record.tree.get(record.leaf) if record.leaf else None
        if turn is None or turn.role != "assistant" or record.tree.children(turn.id):
            return
        start = TurnStart(turn.id, turn.length, turn.id, turn.settings, extends=turn.id)
        with self.step({record.id: (state_of(record), (start_of(start), ()))}):
            lease = self.store.begin(record, start)
        more = tokens_of(record, turn.id, len(turn.token_ids), 3)
        grown = replace(turn, token_ids=turn.token_ids + more, length=turn.length + 3)
        with self.step({record.id: (state_of(record), (start_of(start), more))}, durable=False):
            self.store.journal([(lease, more)])
        record = record.changed([grown])
        with self.step({record.id: (state_of(record), None)}):
            self.records[record.id] = self.store.finish(lease, record, [grown])
        self.store.release(lease)

    def resume(self, record: SessionRecord) -> None:
        """Turns the reply that a killed process left into a turn."""
        entry = self.store.unfinished(record)
        assert entry is not None
        lease = self.store.recover(record)  # SessionBusy: the lease of the dead was not free
        if entry.start.extends == entry.start.reply_id:
            with self.step({record.id: (state_of(record), None)}, durable=False):
                self.store.release(lease)
            return
        expected = tokens_of(record, entry.start.reply_id, 0, len(entry.token_ids))
        assert entry.token_ids == expected, "wrong tokens after resume"
        self.finish(Reply(record, lease, entry.start, entry.token_ids))

    def move(self) -> None:
        """Selects another leaf, as undo and switch do."""
        record = self.pick()
        leaf = self.random.choice([None, *(turn.id for turn in record.tree)])
        record = record.changed(leaf=leaf, pinned=not record.pinned)
        with self.step({record.id: (state_of(record), None)}):
            self.records[record.id] = self.store.change(record)

    def rewrite(self) -> None:
        """Copies the branch under another system prompt."""
        record = self.pick()
        old, parent, length = record.tree.path(record.leaf), None, 0
        made = [Turn(record.tree.new_id(), None, "system", "Be.", {"a": 1})]
        for turn in old:
            parent, new = made[-1].id, record.tree.new_id()
            size = len(turn.token_ids)
            made.append(
                replace(turn, id=new, parent=parent, prefix_length=length, length=length + size)
            )
            length += size
        record = record.changed(made, leaf=made[-1].id)
        with self.step({record.id: (state_of(record), None)}):
            self.records[record.id] = self.store.change(record, made)

    def fork(self) -> None:
        source = self.pick()
        tree = TurnTree.of(source.tree.path(source.leaf))
        name = f"f{self.random.getrandbits(48)}"
        self.add(SessionRecord(name, "local", "append", tree=tree, leaf=source.leaf))

    def rename(self) -> None:
        record = self.pick()
        name = f"r{self.random.getrandbits(48)}"
        with self.step({record.id: ((name, *state_of(record)[1:]), None)}):
            self.records[record.id] = self.store.rename(record, name)

    def remove(self) -> None:
        record = self.pick()
        with self.step({record.id: None}):
            self.store.remove(record)
        del self.records[record.id]

    def checkpoint(self) -> None:
        self.store._database.checkpoint()


# --- the parent --------------------------------------------------------------------------------


def downgrade(data_dir: Path) -> None:
    """Turns the file into one of version 1 that a killed process left."""
    path = data_dir / "sessions.db"
    held = database.Database(path)
    with held.writing() as connection:
        for name in ("turns", "sessions"):
            for what in ("added", "removed", "changed"):
                connection.execute(f"DROP TRIGGER {name}_{what}")
        for trigger in ("turns_begin_nothing", "sessions_answer_nothing"):
            connection.execute(f"DROP TRIGGER {trigger}")
        for what in ("added", "removed", "changed"):
            connection.execute(f"DROP TRIGGER session_tags_{what}")
        for index in ("sessions_by_owner", "sessions_by_number"):
            connection.execute(f"DROP INDEX {index}")
        for name in ("turn_words", "session_words", "beginnings", "session_tags", "stops",
                     "requests"):  # fmt: skip
            connection.execute(f"DROP TABLE {name}")
        for name in ("turn_texts", "session_texts"):
            connection.execute(f"DROP VIEW {name}")
        for column in ("turns.text", "sessions.name", "sessions.title"):
            table, name = column.split(".")
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {name}_words")
        connection.execute("ALTER TABLE journal_tokens DROP COLUMN at")
        connection.execute("PRAGMA user_version = 1")
    assert len(schema.MIGRATIONS) == 7
    held.close()


def child_main(data_dir: Path, seed: int, pipe: int) -> None:
    child = Child(data_dir, random.Random(seed), pipe)
    try:
        child.run(steps=60)
    except BaseException as error:
        child.report(("failed", f"{type(error).__name__}: {error}"))
    os._exit(0)


def listen(pipe: int, until: float) -> bytes:
    """Returns what the child reported so far."""
    output = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        output += data
    return output


def drain(pipe: int) -> bytes:
    output = b""
    while data := os.read(pipe, 1 << 16):
        output += data
    return output


def messages(output: bytes) -> list[Any]:
    found, place = [], 0
    while place + 4 <= len(output):
        (size,) = struct.unpack_from("<I", output, place)
        if place + 4 + size > len(output):
            break
        found.append(pickle.loads(output[place + 4 : place + 4 + size]))
        place += 4 + size
    return found


def without_none(world: World) -> World:
    return {key: value for key, value in world.items() if value is not None}


def case(data_dir: Path, chance: random.Random, world: World) -> tuple[World, str]:
    """Runs and kills one child. Returns the states that may follow and what was wrong."""
    if (data_dir / "sessions.db").exists() and chance.random() < MIGRATIONS:
        downgrade(data_dir)
    read, write = os.pipe()
    seed = chance.getrandbits(64)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        child_main(data_dir, seed, write)
    os.close(write)
    output = listen(read, time.monotonic() + chance.random() * LONGEST)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    output += drain(read)
    os.close(read)
    after = dict(world)
    under_way: World = {}
    for kind, *facts in messages(output):
        if kind == "failed":
            return world, f"the child failed: {facts[0]}"
        if kind == "done":
            after |= under_way
        if kind in ("do", "done"):
            under_way = facts[0] if facts else {}
    return check(data_dir, without_none(after), without_none({**after, **under_way}))


def check(data_dir: Path, before: World, after: World) -> tuple[World, str]:
    """Returns what is wrong with a store that is in neither state, damaged or leased."""
    store = SqliteStore(data_dir)
    try:
        found = seen(store)
        if found not in (before, after):
            return found, f"found {found}, expected {before} or {after}"
        busy = [summary.name for summary in store.summaries() if summary.busy]
        if busy:
            return found, f"sessions {busy} are held by the dead"
        return found, ""
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    finally:
        store.close()


def run(cases: int, seed: int, folder: Path) -> list[str]:
    chance = random.Random(seed)
    wrong = []
    data_dir, world = folder / "0", {}
    for number in range(cases):
        if number % KILLS_PER_DATA_DIR == 0:
            shutil.rmtree(data_dir, ignore_errors=True)
            data_dir, world = folder / str(number), {}
        world, problem = case(data_dir, chance, world)
        if problem:
            wrong.append(f"case {number} of seed {seed}: {problem}")
            print(wrong[-1], file=sys.stderr, flush=True)
            shutil.rmtree(data_dir, ignore_errors=True)
            world = {}
        elif number % KILLS_PER_DATA_DIR == KILLS_PER_DATA_DIR - 1:
            store = SqliteStore(data_dir)
            wrong += [f"case {number} of seed {seed}: {text}" for text in store.verify()]
            store.close()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    memory = Path("/dev/shm")  # a kill takes nothing back from any file system
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    begun = time.monotonic()
    try:
        wrong = run(given.count, given.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rate = given.count / (time.monotonic() - begun)
    print(
        f"{given.count} kills, seed {given.seed}, {rate:.0f}/s: {len(wrong)} failures; with 95 % "
        f"certainty fewer than {3 / given.count:.1e} of all such kills fail"
        * (not wrong)
        or f"{given.count} kills, seed {given.seed}: {len(wrong)} failures"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
