"""Ways to damage a home: its pages, its store, the store's log, single rows, rights and space.

Each takes a home that nobody has open, or, where its kind may be `live`, one that is in use, and a
source of chance; it returns the name of the session that it meant, if it meant one. Those of
`pages` are those of `page_mutations.py` and some more.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.stress import page_mutations
from tests.stress.page_mutations import edit, flip
from turbomind.pages import Page, PageStore

Act = Callable[[Path, random.Random], str | None]
PAGES: dict[str, Act] = {}
STORE: dict[str, Act] = {}  # the database
LOG: dict[str, Act] = {}  # and its write-ahead log: what is lost of it was never there
ROWS: dict[str, Act] = {}
PLACE: dict[str, Act] = {}
KINDS = {"pages": PAGES, "store": STORE, "log": LOG, "rows": ROWS, "place": PLACE}
LIVE = ("pages", "place")  # SQLite does not survive others who write its files under its hands
BLOCK = 4096
NOBODY = 65534


def of(kind: dict[str, Act]) -> Callable[[Act], Act]:
    def enter(act: Act) -> Act:
        kind[act.__name__] = act
        return act

    return enter


# --- pages --------------------------------------------------------------------------------------


def _page_mutation(change: page_mutations.Mutation) -> Act:
    def act(home: Path, draw: random.Random) -> None:
        change(home / "pages", draw)

    return act


PAGES.update({name: _page_mutation(act) for name, act in page_mutations.MUTATIONS.items()})


@of(PAGES)
def used_bit(home: Path, draw: random.Random) -> None:
    """A bit of a payload, not of the room behind one."""
    path = page_mutations.pick(home / "pages", ".kv", draw)
    blocks = path.stat().st_size // BLOCK + 1

    def change(data: bytearray) -> None:
        at = draw.randrange(blocks) * BLOCK + draw.randrange(1024)
        if at < len(data):
            data[at] ^= 1 << draw.randrange(8)

    edit(path, change)


def rewrite(home: Path, change: Callable[[Page], dict[str, Any]]) -> None:
    """Every page anew, with other fields."""
    with PageStore(home / "pages") as store:
        pages = [page for key, _ in store.pages() for page in store.read(key)]
        store.remove([page.key for page in pages])
        for page in pages:
            assert store.write(Page(**{**vars(page), **change(page)}))


@of(PAGES)
def another_model(home: Path, draw: random.Random) -> None:
    """Under keys that are ours."""
    rewrite(home, lambda p: {"fingerprint": "else", "payload": draw.randbytes(len(p.payload))})


@of(PAGES)
def another_size(home: Path, draw: random.Random) -> None:
    factor = draw.choice([0.5, 0.999, 2, 1.001])
    rewrite(home, lambda p: {"payload": draw.randbytes(max(1, int(len(p.payload) * factor)))})


@of(PAGES)
def another_group(home: Path, draw: random.Random) -> None:
    rewrite(home, lambda p: {"group": 1, "payload": draw.randbytes(len(p.payload))})


@of(PAGES)
def other_heads(home: Path, draw: random.Random) -> None:
    heads = draw.choice([(0, 7), (3, 1)])
    payload = draw.randbytes
    rewrite(home, lambda p: {"first_head": heads[0], "heads": heads[1],
                             "payload": payload(len(p.payload))})  # fmt: skip


@of(PAGES)
def another_machine(home: Path, _draw: random.Random) -> None:
    """Good pages, which are used; the reply says so."""
    rewrite(home, lambda _p: {"numerics": "another/1"})


@of(PAGES)
def no_rights_to_a_segment(home: Path, draw: random.Random) -> None:
    path = draw.choice(sorted((home / "pages").iterdir()))
    path.chmod(draw.choice([0, 0o200, 0o400]))


# --- the store ----------------------------------------------------------------------------------


def damage_file(path: Path, draw: random.Random) -> None:
    """What a disk, or somebody, does to a file."""

    def noise(data: bytearray) -> None:
        at, size = draw.randrange(len(data)), draw.choice([16, 512, BLOCK, 3 * BLOCK])
        size = min(size, len(data) - at)
        data[at : at + size] = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])

    def swap(data: bytearray) -> None:
        one, two = (draw.randrange(max(1, len(data) // BLOCK)) * BLOCK for _ in range(2))
        size = min(BLOCK, len(data) - max(one, two))
        block = data[one : one + size]
        data[one : one + size] = data[two : two + size]
        data[two : two + size] = block

    def shift(data: bytearray) -> None:
        at, size = draw.randrange(len(data)), draw.choice([1, 24, BLOCK])
        if draw.random() < 0.5:
            data[at:at] = bytes(size)
        else:
            del data[at : at + size]

    def cut(data: bytearray) -> None:
        size = draw.randrange(len(data) + 1)
        if draw.random() < 0.5:
            size //= draw.choice([1, BLOCK])  # nearly all of it
        del data[size:]

    def longer(data: bytearray) -> None:
        data += draw.randbytes(draw.randrange(1, 3 * BLOCK))

    match draw.randrange(10):
        case 0 | 1 | 2 | 3:
            flip(path, draw, draw.choice([1, 1, 1, 2, 20, 300]))
        case 4:
            edit(path, noise)
        case 5:
            edit(path, swap)
        case 6:
            edit(path, shift)
        case 7:
            edit(path, longer)
        case _:
            edit(path, cut)


def replace_file(path: Path, draw: random.Random) -> None:
    """Nothing, or something else, in the place of a file."""
    path.unlink()
    match draw.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(path, 0o600)
        case 3:
            path.touch()
        case 4:
            path.write_bytes(draw.randbytes(draw.choice([10, 100, 5000])))
        case _:
            pass


@of(STORE)
def damaged_database(home: Path, draw: random.Random) -> None:
    damage_file(home / "sessions.db", draw)


@of(STORE)
def another_file(home: Path, draw: random.Random) -> None:
    replace_file(home / "sessions.db", draw)


@of(STORE)
def header(home: Path, draw: random.Random) -> None:
    """A field of SQLite's header."""
    at, size = draw.choice(
        [(0, 16), (16, 2), (18, 1), (19, 1), (20, 1), (24, 4), (28, 4), (32, 4), (36, 4), (40, 4),
         (44, 4), (52, 4), (56, 4), (60, 4), (64, 4), (68, 4), (92, 4), (96, 4)]
    )  # fmt: skip
    value = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])
    edit(home / "sessions.db", lambda data: data.__setitem__(slice(at, at + size), value))


@of(STORE)
def owners(home: Path, draw: random.Random) -> None:
    """The folder that says whose the leases are."""
    folder = home / "owners"
    shutil.rmtree(folder, ignore_errors=True)
    match draw.randrange(3):
        case 0:
            folder.touch()
        case 1:
            folder.mkdir()
            (folder / draw.choice(["x", "a" * 32, "a.new"])).mkdir()
        case _:
            pass


@of(LOG)
def damaged_log(home: Path, draw: random.Random) -> None:
    path = home / "sessions.db-wal"
    if path.exists() and path.stat().st_size:
        damage_file(path, draw)


@of(LOG)
def another_log(home: Path, draw: random.Random) -> None:
    path = home / "sessions.db-wal"
    path.touch()
    replace_file(path, draw)


@of(LOG)
def log_index(home: Path, draw: random.Random) -> None:
    """The log's shared memory, which is made anew."""
    path = home / "sessions.db-shm"
    if path.exists() and path.stat().st_size and draw.random() < 0.7:
        damage_file(path, draw)
    else:
        path.touch()
        replace_file(path, draw)


# --- single rows --------------------------------------------------------------------------------


def in_session(home: Path, draw: random.Random, statements: list[str]) -> str:
    """One of the statements for the key of a session, whose name it returns."""
    junk = draw.choice([None, 0, -1, 1 << 62, 0.5, "x", b"", b"{}", draw.randbytes(30)])
    with contextlib.closing(sqlite3.connect(home / "sessions.db")) as connection:
        found = connection.execute("SELECT key, name FROM sessions").fetchall()
        key, name = draw.choice(found)
        with contextlib.suppress(sqlite3.IntegrityError):  # a column that takes no such value
            statement = draw.choice(statements)
            connection.execute(statement, {"key": key, "junk": junk, "chance": draw.random()})
        connection.commit()
    return str(name)


_TURN = (
    "(SELECT id FROM turns WHERE session = :key ORDER BY id LIMIT 1 OFFSET "
    "CAST(:chance * (SELECT COUNT(*) FROM turns WHERE session = :key) AS INTEGER))"
)


@of(ROWS)
def a_turn(home: Path, draw: random.Random) -> str:
    columns = ("id", "parent", "revision", "role", "keep", "length", "text", "token_ids", "body",
               "checksum", "position", "session")  # fmt: skip
    where = f"WHERE session = :key AND id = {_TURN}"
    changes = [f"UPDATE turns SET {name} = :junk {where}" for name in columns]
    return in_session(home, draw, [*changes, f"DELETE FROM turns {where}"])


@of(ROWS)
def a_session(home: Path, draw: random.Random) -> str:
    columns = ("id", "owner", "revision", "changed", "leaf", "pinned", "created",
               "last_used", "used_at", "title", "questions", "tokens", "size", "tags", "model",
               "fingerprint", "body", "checksum")  # fmt: skip
    return in_session(
        home, draw, [f"UPDATE sessions SET {name} = :junk WHERE key = :key" for name in columns]
    )


@of(ROWS)
def a_lease(home: Path, draw: random.Random) -> str:
    return in_session(
        home,
        draw,
        [
            "INSERT OR REPLACE INTO leases VALUES (:key, 5, :junk)",
            "INSERT OR REPLACE INTO leases VALUES (:key, :junk, NULL)",
            "INSERT OR REPLACE INTO leases VALUES (:key, :junk, 'gone')",
            "INSERT OR REPLACE INTO leases VALUES (:key, 1, '../sessions.db')",
            "DELETE FROM leases WHERE session = :key",
        ],
    )


@of(ROWS)
def a_journal(home: Path, draw: random.Random) -> str:
    return in_session(
        home,
        draw,
        [
            "UPDATE journal_starts SET start = :junk WHERE session = :key",
            "UPDATE journal_tokens SET token_ids = :junk WHERE session = :key",
            "UPDATE journal_tokens SET number = number + 1 WHERE session = :key",
            "DELETE FROM journal_tokens WHERE session = :key AND number = 0",
            "INSERT OR REPLACE INTO journal_starts VALUES (:key, :junk)",
            "INSERT OR REPLACE INTO journal_tokens VALUES (:key, 0, :junk)",
        ],
    )


# --- rights and space ---------------------------------------------------------------------------


@of(PLACE)
def full_disk(home: Path, draw: random.Random) -> None:
    """No file of this process grows beyond a length, which may be just that of one."""
    sizes = [path.stat().st_size for path in home.rglob("*") if path.is_file()]
    limit = draw.choice([0, 1 << 16, draw.choice(sizes), draw.choice(sizes) + draw.randrange(9000)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@of(PLACE)
def read_only(home: Path, draw: random.Random) -> None:
    """For a user whom rights hold back."""
    everything = [home, *home.rglob("*")]
    if os.geteuid() == 0:
        for path in everything:
            os.chown(path, NOBODY, NOBODY)
    files, folders = [p for p in everything if p.is_file()], [p for p in everything if p.is_dir()]
    chosen = draw.choice([everything, files, folders, [draw.choice(everything)]])
    for path in chosen:
        path.chmod(0o500 if path.is_dir() else 0o400)
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@of(PLACE)
def few_files(_home: Path, draw: random.Random) -> None:
    """No more descriptors than some above those that are open."""
    taken = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 60
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + draw.randrange(12), hard))


def healed(home: Path) -> None:
    """The home as it was before `read_only`."""
    for path in [home, *home.rglob("*")]:
        if path.is_symlink():
            continue
        if os.geteuid() == 0:
            os.chown(path, 0, 0)
        if path.is_dir():
            path.chmod(0o700)
        elif path.is_file() and path.stat().st_mode & 0o600 == 0o400:
            path.chmod(0o600)
