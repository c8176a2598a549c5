"""Ways to damage a data directory: pages, database, its log, single rows, permissions and space.

Each function takes a data directory and a random generator, and returns the name of the session
that it damaged, or None. The directory is closed, or in use where the kind may be `live`. The
damage to pages is that of `page_mutations.py` and some more.
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
from turbomind.engine.pages import Page, PageStore

Act = Callable[[Path, random.Random], str | None]
PAGES: dict[str, Act] = {}
STORE: dict[str, Act] = {}  # the database
LOG: dict[str, Act] = {}  # and its write-ahead log; a lost part of it counts as never written
ROWS: dict[str, Act] = {}
PLACE: dict[str, Act] = {}
KINDS = {"pages": PAGES, "store": STORE, "log": LOG, "rows": ROWS, "place": PLACE}
LIVE = ("pages", "place")  # SQLite does not survive a foreign write to files that it has open
BLOCK = 4096
NOBODY = 65534


def of(kind: dict[str, Act]) -> Callable[[Act], Act]:
    def enter(act: Act) -> Act:
        kind[act.__name__] = act
        return act

    return enter


# --- pages --------------------------------------------------------------------------------------


def _page_mutation(change: page_mutations.Mutation) -> Act:
    def act(data_dir: Path, rng: random.Random) -> None:
        change(data_dir / "pages", rng)

    return act


PAGES.update({name: _page_mutation(act) for name, act in page_mutations.MUTATIONS.items()})


@of(PAGES)
def used_bit(data_dir: Path, rng: random.Random) -> None:
    """Flips a bit of a payload, not of the padding after it."""
    path = page_mutations.pick(data_dir / "pages", ".kv", rng)
    blocks = path.stat().st_size // BLOCK + 1

    def change(data: bytearray) -> None:
        at = rng.randrange(blocks) * BLOCK + rng.randrange(1024)
        if at < len(data):
            data[at] ^= 1 << rng.randrange(8)

    edit(path, change)


def rewrite(data_dir: Path, change: Callable[[Page], dict[str, Any]]) -> None:
    """Writes every page again with changed fields."""
    with PageStore(data_dir / "pages") as store:
        pages = [page for key, _ in store.pages() for page in store.read(key)]
        store.remove([page.key for page in pages])
        for page in pages:
            assert store.write(Page(**{**vars(page), **change(page)}))


@of(PAGES)
def another_model(data_dir: Path, rng: random.Random) -> None:
    """Writes pages of another model under the hashes of this one."""
    rewrite(data_dir, lambda p: {"fingerprint": "else", "payload": rng.randbytes(len(p.payload))})


@of(PAGES)
def another_size(data_dir: Path, rng: random.Random) -> None:
    factor = rng.choice([0.5, 0.999, 2, 1.001])
    rewrite(data_dir, lambda p: {"payload": rng.randbytes(max(1, int(len(p.payload) * factor)))})


@of(PAGES)
def another_group(data_dir: Path, rng: random.Random) -> None:
    rewrite(data_dir, lambda p: {"group": 1, "payload": rng.randbytes(len(p.payload))})


@of(PAGES)
def other_heads(data_dir: Path, rng: random.Random) -> None:
    heads = rng.choice([(0, 7), (3, 1)])
    payload = rng.randbytes
    rewrite(data_dir, lambda p: {"first_head": heads[0], "heads": heads[1],
                             "payload": payload(len(p.payload))})  # fmt: skip


@of(PAGES)
def another_machine(data_dir: Path, _draw: random.Random) -> None:
    """Writes valid pages of another machine. They are used, and the reply reports it."""
    rewrite(data_dir, lambda _p: {"numerics": "another/1"})


@of(PAGES)
def no_rights_to_a_segment(data_dir: Path, rng: random.Random) -> None:
    path = rng.choice(sorted((data_dir / "pages").iterdir()))
    path.chmod(rng.choice([0, 0o200, 0o400]))


# --- the store ----------------------------------------------------------------------------------


def damage_file(path: Path, rng: random.Random) -> None:
    """Damages a file as a disk or another program may."""

    def noise(data: bytearray) -> None:
        at, size = rng.randrange(len(data)), rng.choice([16, 512, BLOCK, 3 * BLOCK])
        size = min(size, len(data) - at)
        data[at : at + size] = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])

    def swap(data: bytearray) -> None:
        one, two = (rng.randrange(max(1, len(data) // BLOCK)) * BLOCK for _ in range(2))
        size = min(BLOCK, len(data) - max(one, two))
        block = data[one : one + size]
        data[one : one + size] = data[two : two + size]
        data[two : two + size] = block

    def shift(data: bytearray) -> None:
        at, size = rng.randrange(len(data)), rng.choice([1, 24, BLOCK])
        if rng.random() < 0.5:
            data[at:at] = bytes(size)
        else:
            del data[at : at + size]

    def cut(data: bytearray) -> None:
        size = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            size //= rng.choice([1, BLOCK])  # nearly all of it
        del data[size:]

    def longer(data: bytearray) -> None:
        data += rng.randbytes(rng.randrange(1, 3 * BLOCK))

    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            flip(path, rng, rng.choice([1, 1, 1, 2, 20, 300]))
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


def replace_file(path: Path, rng: random.Random) -> None:
    """Removes a file or puts something else in its place."""
    path.unlink()
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(path, 0o600)
        case 3:
            path.touch()
        case 4:
            path.write_bytes(rng.randbytes(rng.choice([10, 100, 5000])))
        case _:
            pass


@of(STORE)
def damaged_database(data_dir: Path, rng: random.Random) -> None:
    damage_file(data_dir / "sessions.db", rng)


@of(STORE)
def another_file(data_dir: Path, rng: random.Random) -> None:
    replace_file(data_dir / "sessions.db", rng)


@of(STORE)
def header(data_dir: Path, rng: random.Random) -> None:
    """Changes a field of SQLite's header."""
    at, size = rng.choice(
        [(0, 16), (16, 2), (18, 1), (19, 1), (20, 1), (24, 4), (28, 4), (32, 4), (36, 4), (40, 4),
         (44, 4), (52, 4), (56, 4), (60, 4), (64, 4), (68, 4), (92, 4), (96, 4)]
    )  # fmt: skip
    value = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size)])
    edit(data_dir / "sessions.db", lambda data: data.__setitem__(slice(at, at + size), value))


@of(STORE)
def owners(data_dir: Path, rng: random.Random) -> None:
    """Damages the folder that names the owners of leases."""
    folder = data_dir / "owners"
    shutil.rmtree(folder, ignore_errors=True)
    match rng.randrange(3):
        case 0:
            folder.touch()
        case 1:
            folder.mkdir()
            (folder / rng.choice(["x", "a" * 32, "a.new"])).mkdir()
        case _:
            pass


@of(LOG)
def damaged_log(data_dir: Path, rng: random.Random) -> None:
    path = data_dir / "sessions.db-wal"
    if path.exists() and path.stat().st_size:
        damage_file(path, rng)


@of(LOG)
def another_log(data_dir: Path, rng: random.Random) -> None:
    path = data_dir / "sessions.db-wal"
    path.touch()
    replace_file(path, rng)


@of(LOG)
def log_index(data_dir: Path, rng: random.Random) -> None:
    """Damages the log's shared memory, which SQLite rebuilds."""
    path = data_dir / "sessions.db-shm"
    if path.exists() and path.stat().st_size and rng.random() < 0.7:
        damage_file(path, rng)
    else:
        path.touch()
        replace_file(path, rng)


# --- single rows --------------------------------------------------------------------------------


def in_session(data_dir: Path, rng: random.Random, statements: list[str]) -> str:
    """Runs a statement on the row of a session and returns its name."""
    junk = rng.choice([None, 0, -1, 1 << 62, 0.5, "x", b"", b"{}", rng.randbytes(30)])
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        found = connection.execute("SELECT key, name FROM sessions").fetchall()
        key, name = rng.choice(found)
        with contextlib.suppress(sqlite3.IntegrityError):  # a column that takes no such value
            statement = rng.choice(statements)
            connection.execute(statement, {"key": key, "junk": junk, "chance": rng.random()})
        connection.commit()
    return str(name)


_TURN = (
    "(SELECT id FROM turns WHERE session = :key ORDER BY id LIMIT 1 OFFSET "
    "CAST(:chance * (SELECT COUNT(*) FROM turns WHERE session = :key) AS INTEGER))"
)


@of(ROWS)
def a_turn(data_dir: Path, rng: random.Random) -> str:
    columns = ("id", "parent", "revision", "role", "keep", "length", "text", "token_ids", "body",
               "checksum", "position", "session")  # fmt: skip
    where = f"WHERE session = :key AND id = {_TURN}"
    changes = [f"UPDATE turns SET {name} = :junk {where}" for name in columns]
    return in_session(data_dir, rng, [*changes, f"DELETE FROM turns {where}"])


@of(ROWS)
def a_session(data_dir: Path, rng: random.Random) -> str:
    columns = ("id", "owner", "revision", "changed", "leaf", "pinned", "created",
               "last_used", "used_at", "title", "questions", "tokens", "size", "tags", "model",
               "fingerprint", "body", "checksum")  # fmt: skip
    return in_session(
        data_dir, rng, [f"UPDATE sessions SET {name} = :junk WHERE key = :key" for name in columns]
    )


@of(ROWS)
def a_lease(data_dir: Path, rng: random.Random) -> str:
    return in_session(
        data_dir,
        rng,
        [
            "INSERT OR REPLACE INTO leases VALUES (:key, 5, :junk)",
            "INSERT OR REPLACE INTO leases VALUES (:key, :junk, NULL)",
            "INSERT OR REPLACE INTO leases VALUES (:key, :junk, 'gone')",
            "INSERT OR REPLACE INTO leases VALUES (:key, 1, '../sessions.db')",
            "DELETE FROM leases WHERE session = :key",
        ],
    )


@of(ROWS)
def a_journal(data_dir: Path, rng: random.Random) -> str:
    return in_session(
        data_dir,
        rng,
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
def full_disk(data_dir: Path, rng: random.Random) -> None:
    """Limits the length of every file of this process."""
    sizes = [path.stat().st_size for path in data_dir.rglob("*") if path.is_file()]
    limit = rng.choice([0, 1 << 16, rng.choice(sizes), rng.choice(sizes) + rng.randrange(9000)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@of(PLACE)
def read_only(data_dir: Path, rng: random.Random) -> None:
    """Makes files read-only, for a user who is not root."""
    everything = [data_dir, *data_dir.rglob("*")]
    if os.geteuid() == 0:
        for path in everything:
            os.chown(path, NOBODY, NOBODY)
    files, folders = [p for p in everything if p.is_file()], [p for p in everything if p.is_dir()]
    chosen = rng.choice([everything, files, folders, [rng.choice(everything)]])
    for path in chosen:
        path.chmod(0o500 if path.is_dir() else 0o400)
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@of(PLACE)
def few_files(_home: Path, rng: random.Random) -> None:
    """Limits the process to a few more file descriptors than are open."""
    taken = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 60
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + rng.randrange(12), hard))


def healed(data_dir: Path) -> None:
    """Undoes `read_only`."""
    for path in [data_dir, *data_dir.rglob("*")]:
        if path.is_symlink():
            continue
        if os.geteuid() == 0:
            os.chown(path, 0, 0)
        if path.is_dir():
            path.chmod(0o700)
        elif path.is_file() and path.stat().st_mode & 0o600 == 0o400:
            path.chmod(0o600)
