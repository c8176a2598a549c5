"""Folders, records, comparisons and faults for tests of the store of sessions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmchat.errors import StoreError
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Turn

MEMORY = Path("/dev/shm")
ENOUGH = 1 << 30  # bytes of free space; containers often have only 64 MiB


def memory() -> Path | None:
    """Returns a file system in memory with room for a test, where a sync is free. None: there is
    none, and tests use the system's temporary folder."""
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ENOUGH
    return MEMORY if usable else None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yields a new folder, in memory if possible, because no test depends on a disk's syncs."""
    with tempfile.TemporaryDirectory(
        prefix="lmchat-", dir=memory(), ignore_cleanup_errors=True
    ) as path:
        yield Path(path)


@pytest.fixture(name="data_dir")
def home_in_memory() -> Iterator[Path]:
    with folder() as path:
        yield path / "data"


@pytest.fixture(name="store")
def opened_store(data_dir: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(data_dir)
    yield opened
    opened.close()


@pytest.fixture(name="other")
def another_owner(data_dir: Path, store: SqliteStore) -> Iterator[SqliteStore]:
    """The same store as a second process opens it."""
    opened = SqliteStore(data_dir)
    yield opened
    opened.close()


def user(
    number: int,
    parent: int | None = None,
    text: str = "hi",
    prefix_length: int = 0,
    ids: Any = (1, 2),
) -> Turn:
    message = {"role": "user", "content": text}
    return Turn(number, parent, "user", text, message, ids, prefix_length, prefix_length + len(ids))


def reply(
    number: int,
    parent: int,
    prefix_length: int,
    ids: Any = (3, 4, 5),
    text: str = "there",
    **more: Any,
) -> Turn:
    message = {"role": "assistant", "content": text}
    return Turn(
        number,
        parent,
        "assistant",
        text,
        message,
        ids,
        prefix_length,
        prefix_length + len(ids),
        **more,
    )


def talk(name: str = "talk", turns: int = 1, text: str = "hi", **more: Any) -> SessionRecord:
    """Returns a record with turns that are not stored yet."""
    record = SessionRecord(name, "me", "append", **more)
    for _ in range(turns):
        record, _turns = grow(record, text)
    return record


def grow(record: SessionRecord, text: str = "hi") -> tuple[SessionRecord, list[Turn]]:
    """Returns the record with two more turns, and these."""
    tree = record.tree
    length = tree.get(record.leaf).length if record.leaf else 0
    asked = user(tree.new_id(), record.leaf, text, length)
    answer = reply(tree.new_id(), asked.id, asked.length)
    return record.changed([asked, answer], leaf=answer.id), [asked, answer]


def fields(record: SessionRecord) -> dict[str, Any]:
    """Returns all of a record, to compare."""
    return {
        **{f.name: getattr(record, f.name) for f in dataclasses.fields(record)},
        "tree": [_comparable(turn) for turn in record.tree],
        "children": {t.id: [c.id for c in record.tree.children(t.id)] for t in record.tree},
    }


def _comparable(turn: Turn) -> tuple[Any, ...]:
    """Returns a turn in a form in which equal errors compare as equal."""
    return dataclasses.replace(turn, error=None), type(turn.error), str(turn.error)


def stored_session(data_dir: Path, name: str = "trip") -> SessionRecord | None:
    """Returns a user's session as the store in a data directory has it."""
    store = SqliteStore(data_dir)
    try:
        return store.find("local", name)
    finally:
        store.close()


def assert_same(found: SessionRecord, expected: SessionRecord) -> None:
    assert fields(found) == fields(expected)


SMALL = "48m"


@pytest.fixture(name="disk")
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no leave to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fills the file system to the last block."""
    with contextlib.suppress(OSError), (disk / f"fill-{os.urandom(4).hex()}").open("wb") as file:
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    with (disk / "last").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(disk).f_bavail == 0


# The methods that can fail.
CALLS = (
    "find", "add", "add_numbered", "refresh", "rename", "change", "remove", "begin", "journal",
    "sync", "finish", "release", "unfinished", "recover", "request", "mark_request",
)  # fmt: skip


class FaultyStore:
    """A store in which the calls of `failing` raise StoreError before they do anything.

    `failing` is a method's name with the numbers of its first and last failing call, from 1.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.data_dir = getattr(store, "data_dir", None)
        self.failing: tuple[str, int, int] | None = None
        self.calls: Counter[str] = Counter()

    def fail(self, name: str, first: int = 1, last: int | None = None) -> None:
        """Makes calls `first` to `last` of a method fail, counted from now."""
        self.calls.clear()
        self.failing = (name, first, first if last is None else last)

    def heal(self) -> None:
        """Ends all failures."""
        self.failing = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in CALLS:
            return method

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if self.failing is not None:
                failing, first, last = self.failing
                if name == failing and first <= self.calls[name] <= last:
                    raise StoreError(f"{name} fails, as the test asked")
            return method(*args, **options)

        return call
