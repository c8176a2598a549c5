"""Simulates power cuts at 20,000 moments of a workload on the store, and checks what is left.

    python -m tests.stress.store_power_cut --states 20000 --seed 1

The workload of store_kill.py runs under strace, which records its writes, truncations, creations,
unlinks and syncs of the database and its log. A state of the disk consists of what was synced
before the cut and any part of the rest. Each write, and each sector of it, survives or is lost on
its own, so a later one may survive an earlier one. A name that was created or removed without a
sync of its folder may be the old one. The store opens each such state as the state after one of the
steps since the last acknowledged or synced one.

`--synchronous OFF` and `--sync-with empty` break the store on purpose, and the simulator finds it.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # when run as a script

from lmchat.store.sqlite import database
from lmchat.store.sqlite.sqlite_store import SqliteStore
from tests.stress import store_kill

SECTOR = 512
RUNS = 4  # of the workload, the store closed between them
STEPS = 30
CALLS = "write,pwrite64,fsync,fdatasync,ftruncate,unlink,openat,rename"


# --- the workload, in a process of its own ------------------------------------------------------


def workload(data_dir: Path, seed: int, output: int, synchronous: str, sync_with: str) -> None:
    break_store(synchronous, sync_with)
    for number in range(RUNS):
        child = store_kill.Child(data_dir, random.Random(seed * RUNS + number), output)
        child.run(STEPS)
        child.stream(child.begin(child.pick()))  # stays unfinished
        child.store.close()


def break_store(synchronous: str, sync_with: str) -> None:
    connect = database.Database._connect

    def broken(self: database.Database, durable: bool = True) -> Any:
        connection = connect(self, durable)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        return connection

    def empty(self: database.Database) -> None:
        with self.writing():
            pass

    if synchronous != "FULL":
        database.Database._connect = broken
    if sync_with == "empty":
        database.Database.sync = empty


# --- what was recorded --------------------------------------------------------------------------


@dataclass
class Event:
    """A call on a file of the store, or `say` for something shown. A sync has two events: writes
    before its `sync` are durable after its `synced`."""

    kind: str  # "write", "truncate", "create", "unlink", "sync", "synced", "say"
    path: str
    offset: int = 0
    data: bytes = b""


_LINE = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(\(| resumed>)(.*)$")
_FD = re.compile(r"^\d+<([^>]*)>")
_OFFSET = re.compile(r", (\d+)(?:\)| <unfinished)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def plain(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def events_of(trace: Path, data_dir: Path, output: Path) -> Iterator[Event]:
    """Yields the events of a trace, in order."""
    syncing: dict[str, str] = {}  # by thread, what it syncs
    for line in trace.read_text().splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        thread, call, kind, rest = match.groups()
        if kind == " resumed>":
            if call in ("fsync", "fdatasync") and thread in syncing:
                yield Event("synced", syncing.pop(thread))
            continue
        if rest.endswith(" = -1") or ") = -1 " in rest:
            continue
        ended = not rest.endswith("<unfinished ...>")
        for event in events_of_call(call, rest):
            if event.path == str(output):
                yield Event("say", "", data=event.data)
            elif ours(event.path, data_dir):
                yield event
                if event.kind == "sync" and ended:
                    yield Event("synced", event.path)
                elif event.kind == "sync":
                    syncing[thread] = event.path


def ours(path: str, data_dir: Path) -> bool:
    name = Path(path).name
    inside = Path(path).parent == data_dir and name.startswith("sessions.db")
    return path == str(data_dir) or (inside and not name.endswith("-shm"))


def events_of_call(call: str, rest: str) -> Iterator[Event]:
    texts = [plain(text) for text in _TEXT.findall(rest)]
    opened = _FD.match(rest)
    path = plain(opened[1]).decode() if opened else ""
    if call == "write":
        yield Event("write", path, data=texts[0])
    elif call == "pwrite64":
        yield Event("write", path, int(_OFFSET.findall(rest)[-1]), texts[0])
    elif call == "ftruncate":
        yield Event("truncate", path, int(re.split(r"[,)<]", rest.split(">, ", 1)[1])[0]))
    elif call in ("fsync", "fdatasync"):
        yield Event("sync", path)
    elif call == "unlink":
        yield Event("unlink", texts[0].decode())
    elif call == "openat" and "O_CREAT" in rest:
        yield Event("create", texts[0].decode())
    elif call == "rename":
        assert not ours(texts[0].decode(), Path(texts[0].decode()).parent), "not simulated"


# --- the disk -----------------------------------------------------------------------------------


@dataclass
class File:
    """The durable content of a file and the changes since."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, Event]] = field(default_factory=list)


def apply(content: bytearray, event: Event, reaches_disk: Any = None) -> None:
    """Applies a write or truncation. `reaches_disk` chooses the sectors that reach the disk."""
    if event.kind == "truncate":
        del content[event.offset :]
        content.extend(bytes(event.offset - len(content)))
        return
    place, end = event.offset, event.offset + len(event.data)
    while place < end:
        stop = min(end, (place // SECTOR + 1) * SECTOR)
        if reaches_disk is None or reaches_disk():
            content.extend(bytes(max(0, stop - len(content))))
            content[place:stop] = event.data[place - event.offset : stop - event.offset]
        place = stop


class Disk:
    """Files by name, each name with its history since the last sync of the folder."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = str(data_dir)
        self.names: dict[str, list[File | None]] = {}
        self._syncs: dict[str, tuple[File | None, int]] = {}
        self._number = 0

    def now(self, path: str) -> File | None:
        return self.names.get(path, [None])[-1]

    def take(self, event: Event) -> None:
        self._number += 1
        path, file = event.path, self.now(event.path)
        if event.kind == "create":
            if file is None:
                self.names.setdefault(path, [None]).append(File())
        elif event.kind == "unlink":
            self.names.setdefault(path, [None]).append(None)
        elif event.kind == "sync":
            self._syncs[path] = (file, self._number)
        elif event.kind == "synced":
            self._synced(path, *self._syncs[path])
        elif event.kind in ("write", "truncate"):
            assert file is not None, f"{path} was written before it was made"
            file.pending.append((self._number, event))

    def _synced(self, path: str, file: File | None, number: int) -> None:
        if path == self.data_dir:
            self.names = {name: history[-1:] for name, history in self.names.items()}
        if file is not None:
            for done, event in file.pending:
                if done < number:
                    apply(file.safe, event)
            file.pending = [(done, event) for done, event in file.pending if done > number]

    def content(self, path: str) -> bytes | None:
        """Returns the content that processes see before the cut."""
        file = self.now(path)
        if file is None:
            return None
        content = bytearray(file.safe)
        for _, event in file.pending:
            apply(content, event)
        return bytes(content)

    def cut(self, chance: random.Random) -> dict[str, bytes]:
        """Returns one of the states that a power cut may leave."""
        found = {}
        for path, history in self.names.items():
            file = history[-1] if chance.random() < 0.5 else chance.choice(history)
            if file is not None:
                found[path] = what_is_left(file, chance)
        return found


def what_is_left(file: File, chance: random.Random) -> bytes:
    content, events = bytearray(file.safe), [event for _, event in file.pending]
    way = chance.choice(("all", "none", "writes", "sectors", "one lost", "one written", "torn end"))
    one = chance.randrange(len(events)) if events else 0
    share = chance.random()
    for index, event in enumerate(events):
        if way == "sectors" or (way == "torn end" and index == one):
            apply(content, event, lambda: chance.random() < share)
        elif (
            way == "all"
            or (way == "writes" and chance.random() < share)
            or (way == "one lost" and index != one)
            or (way == "one written" and index == one)
            or (way == "torn end" and index < one)
        ):
            apply(content, event)
    return bytes(content)


# --- possible states --------------------------------------------------------------------------


class Steps:
    """The states of the store after each step, and those that a cut may leave."""

    def __init__(self) -> None:
        self.worlds: list[store_kill.World] = [{}]
        self.least = 0  # the last one that is durable
        self._durable = True

    def take(self, data: bytes) -> None:
        for kind, *facts in store_kill.messages(data):
            if kind == "do":
                after, self._durable = facts
                self.worlds.append(store_kill.without_none({**self.worlds[-1], **after}))
            elif kind == "synced" or self._durable:
                self.least = len(self.worlds) - 1


def check(folder: Path, state: dict[str, bytes], steps: Steps, verify: bool) -> str:
    """Returns what is wrong with a state, or an empty text."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in state.items():
        (folder / Path(path).name).write_bytes(content)
    try:
        store = SqliteStore(folder)
        try:
            found = store_kill.seen(store)
            wrong = store.verify() if verify else []
        finally:
            store.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found not in steps.worlds[steps.least :]:
        return f"found none of the states {steps.least} to {len(steps.worlds) - 1}: {found}"
    return "; ".join(wrong)


# --- all together -------------------------------------------------------------------------------


def record(folder: Path, seed: int, synchronous: str, sync_with: str) -> list[Event]:
    """Records the events of one workload. Raises RuntimeError where strace is missing."""
    data_dir, output, trace = folder / "data", folder / "output", folder / "trace"
    command = [
        "strace", "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "100000000",
        "-o", str(trace), "-e", f"trace={CALLS}",
        sys.executable, __file__, "--workload", str(folder), "--seed", str(seed),
        "--synchronous", synchronous, "--sync-with", sync_with,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        raise RuntimeError("strace is not installed") from None
    if done.returncode:
        raise RuntimeError(f"the workload could not be recorded: {done.stderr.strip()[-500:]}")
    events = list(events_of(trace, data_dir, output))
    trace.unlink()
    check_recording(events, data_dir)
    return events


def check_recording(events: list[Event], data_dir: Path) -> None:
    """Checks that replaying all events makes the files as they are."""
    disk = Disk(data_dir)
    for event in events:
        disk.take(event)
    for path in disk.names:
        if path.endswith("-spare"):  # room set aside, in which nothing is written
            continue
        real = Path(path).read_bytes() if Path(path).exists() else None
        assert disk.content(path) == real, f"{path} is not what was recorded"
    assert disk.content(str(data_dir / "sessions.db")), "nothing was recorded"


def run(
    states: int,
    seed: int,
    folder: Path,
    synchronous: str = "FULL",
    sync_with: str = "log",
    until_first: bool = False,
) -> list[str]:
    chance = random.Random(seed)
    events = record(folder, seed, synchronous, sync_with)
    cuts = sorted(chance.randrange(len(events)) for _ in range(states))
    disk, steps, wrong = Disk(folder / "data"), Steps(), []
    place = 0
    for number, cut in enumerate(cuts):
        for event in events[place : cut + 1]:
            if event.kind == "say":
                steps.take(event.data)
            else:
                disk.take(event)
        place = max(place, cut + 1)
        problem = check(folder / "state", disk.cut(chance), steps, number % 20 == 0)
        if problem:
            wrong.append(f"state {number} of seed {seed}, cut at call {cut}: {problem[:1000]}")
            if until_first:
                break
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--synchronous", default="FULL", choices=["FULL", "NORMAL", "OFF"])
    parser.add_argument("--sync-with", default="log", choices=["log", "empty"])
    parser.add_argument("--until-first", action="store_true", help="stop at the first failure")
    parser.add_argument("--workload", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    broken = given.synchronous, given.sync_with
    if given.workload:
        with (given.workload / "output").open("wb", buffering=0) as output:
            workload(given.workload / "data", given.seed, output.fileno(), *broken)
        return 0
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        wrong = run(given.states, given.seed, folder, *broken, given.until_first)
    except RuntimeError as error:
        print(f"skipped: {error}")
        return 77
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(*wrong[:5], sep="\n", file=sys.stderr)
    print(f"{given.states} states, seed {given.seed}: {len(wrong)} failures")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
