"""Damages folders of stored pages and checks what can still be read.

    python -m tests.stress.page_mutations --count 5000

Each case changes a copy of a good folder before or after a store opens it: bits, lengths, places,
names, versions, permissions, free space. Every page is then absent or exactly right, untouched
pages are present, the store keeps working, and a second reading agrees.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.stored_pages import FINGERPRINT, NUMERICS, chain, check, xxh64
from turbomind.engine.pages import Page, PageStore, root_key

HEADER, ALIGNMENT, BODY = 64, 4096, 128
EVERYTHING = 1 << 30
Mutation = Callable[[Path, random.Random], int]  # returns how many pages may be missing
MUTATIONS: dict[str, Mutation] = {}


def mutation(change: Mutation) -> Mutation:
    MUTATIONS[change.__name__] = change
    return change


def pick(folder: Path, suffix: str, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob(f"*{suffix}")))


def records(index: bytes) -> list[tuple[int, int]]:
    """Returns (offset, length) of the records of a good index."""
    found, at = [], HEADER
    while at < len(index):
        size = struct.unpack_from("<I", index, at + 8)[0]
        found.append((at, size))
        at += size
    return found


def sealed(record: bytearray, segment: int, offset: int) -> bytearray:
    """Returns the record with a matching checksum."""
    seed = segment ^ (offset * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    struct.pack_into("<Q", record, 88, xxh64(bytes(record[BODY:]), xxh64(bytes(record[:88]), seed)))
    return record


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(path: Path, rng: random.Random, count: int = 1) -> None:
    def change(data: bytearray) -> None:
        for _ in range(count):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

    edit(path, change)


@mutation
def payload_bit(folder: Path, rng: random.Random) -> int:
    flip(pick(folder, ".kv", rng), rng)
    return 1


@mutation
def index_bit(folder: Path, rng: random.Random) -> int:
    path = pick(folder, ".idx", rng)
    before = path.read_bytes()
    flip(path, rng)
    return EVERYTHING if path.read_bytes()[:HEADER] != before[:HEADER] else 1


@mutation
def many_bits(folder: Path, rng: random.Random) -> int:
    flip(pick(folder, rng.choice([".kv", ".idx"]), rng), rng, rng.randrange(1, 200))
    return EVERYTHING


@mutation
def truncation(folder: Path, rng: random.Random) -> int:
    path = pick(folder, rng.choice([".kv", ".idx"]), rng)
    os.truncate(path, rng.randrange(path.stat().st_size + 1))
    return EVERYTHING


@mutation
def torn_tail(folder: Path, rng: random.Random) -> int:
    path = pick(folder, ".idx", rng)
    os.truncate(path, path.stat().st_size - rng.randrange(1, 200))
    return 2  # records of few tokens are short


@mutation
def noise(folder: Path, rng: random.Random) -> int:
    def change(data: bytearray) -> None:
        at, size = rng.randrange(len(data)), rng.randrange(1, 3000)
        data[at : at + size] = rng.randbytes(size) if rng.random() < 0.5 else bytes(size)

    edit(pick(folder, rng.choice([".kv", ".idx"]), rng), change)
    return EVERYTHING


@mutation
def longer(folder: Path, rng: random.Random) -> int:
    with pick(folder, rng.choice([".kv", ".idx"]), rng).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 5000)))
    return 0


@mutation
def shifted(folder: Path, rng: random.Random) -> int:
    def change(data: bytearray) -> None:
        at, size = rng.randrange(len(data)), rng.choice([1, 8, 408, 4096])
        if rng.random() < 0.5:
            data[at:at] = bytes(size)
        else:
            del data[at : at + size]

    edit(pick(folder, rng.choice([".kv", ".idx"]), rng), change)
    return EVERYTHING


@mutation
def swapped_payloads(folder: Path, rng: random.Random) -> int:
    one, two = pick(folder, ".kv", rng), pick(folder, ".kv", rng)
    blocks = [rng.randrange(p.stat().st_size // ALIGNMENT) * ALIGNMENT for p in (one, two)]
    data = [p.read_bytes()[at : at + ALIGNMENT] for p, at in zip((one, two), blocks, strict=True)]
    for path, at, block in zip((two, one), blocks[::-1], data, strict=True):
        edit(path, lambda d, at=at, block=block: d.__setitem__(slice(at, at + len(block)), block))
    return 2


@mutation
def swapped_records(folder: Path, rng: random.Random) -> int:
    one, two = pick(folder, ".idx", rng), pick(folder, ".idx", rng)
    first, second = one.read_bytes(), two.read_bytes()
    (a, size), (b, other) = rng.choice(records(first)), rng.choice(records(second))
    size = min(size, other)
    edit(one, lambda d: d.__setitem__(slice(a, a + size), second[b : b + size]))
    edit(two, lambda d: d.__setitem__(slice(b, b + size), first[a : a + size]))
    return 2


@mutation
def swapped_files(folder: Path, rng: random.Random) -> int:
    suffix = rng.choice([".kv", ".idx"])
    one, two = pick(folder, suffix, rng), pick(folder, suffix, rng)
    one.rename(folder / "x")
    if one != two:
        two.rename(one)
    (folder / "x").rename(two)
    return EVERYTHING


@mutation
def renamed_segment(folder: Path, rng: random.Random) -> int:
    path = pick(folder, ".idx", rng)
    name = f"{rng.getrandbits(64):016x}"
    for suffix in (".idx", ".kv"):
        path.with_suffix(suffix).rename(folder / f"{name}{suffix}")
    return EVERYTHING


@mutation
def doubled_segment(folder: Path, rng: random.Random) -> int:
    path = pick(folder, ".idx", rng)
    name = f"{rng.getrandbits(64):016x}"
    for suffix in (".idx", ".kv"):
        shutil.copy(path.with_suffix(suffix), folder / f"{name}{suffix}")
    return 0


@mutation
def missing_file(folder: Path, rng: random.Random) -> int:
    pick(folder, rng.choice([".kv", ".idx"]), rng).unlink()
    return EVERYTHING


@mutation
def missing_folder(folder: Path, rng: random.Random) -> int:
    shutil.rmtree(folder)
    return EVERYTHING


@mutation
def other_kind_of_file(folder: Path, rng: random.Random) -> int:
    path = pick(folder, rng.choice([".kv", ".idx"]), rng)
    path.unlink()
    match rng.randrange(4):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("/dev/zero")
        case 2:
            os.mkfifo(path)
        case 3:
            path.touch()
    return EVERYTHING


@mutation
def changed_field(folder: Path, rng: random.Random) -> int:
    """Returns a record with a changed field and a matching checksum."""
    path = pick(folder, ".idx", rng)
    form, at, value = rng.choice(
        [
            ("<H", 4, rng.choice([0, 2, 65535])),  # version
            ("<H", 6, rng.choice([0, 1, 63, 65, 65535])),  # tokens
            ("<I", 8, rng.choice([0, 8, 1 << 31])),  # bytes of the record
            ("<i", 12, rng.choice([-1, 7, 1 << 30])),  # group
            ("<Q", 16, rng.getrandbits(64)),  # key
            ("<Q", 32, rng.getrandbits(64)),  # parent
            ("<i", 52, rng.choice([-5, 3])),  # heads
            ("<H", 56, rng.choice([0, 65535])),  # fingerprint's length
            ("<Q", 64, rng.choice([1, 4096, 1 << 40, (1 << 64) - 4096])),  # payload's offset
            ("<Q", 72, rng.choice([0, 1, 2999, 1 << 29, 1 << 40, (1 << 64) - 1])),  # its length
            ("<Q", 80, rng.getrandbits(64)),  # its checksum
            ("<i", BODY, rng.getrandbits(31)),  # the first token
        ]
    )

    def change(data: bytearray) -> None:
        offset, size = rng.choice(records(bytes(data)))
        record = bytearray(data[offset : offset + size])
        struct.pack_into(form, record, at, value)
        data[offset : offset + size] = sealed(record, int(path.stem, 16), offset)

    edit(path, change)
    return 2  # a page and, where the group or heads changed, what now stands for it


@mutation
def other_version(folder: Path, rng: random.Random) -> int:
    def change(data: bytearray) -> None:
        struct.pack_into("<I", data, 8, rng.choice([0, 2, 1 << 31]))
        struct.pack_into("<Q", data, 56, xxh64(bytes(data[:56])))

    edit(pick(folder, ".idx", rng), change)
    return EVERYTHING


@mutation
def marks(folder: Path, rng: random.Random) -> int:
    """Changes words that are written in place: removal marks, retention priorities, uses."""

    def change(data: bytearray) -> None:
        offset, _ = rng.choice(records(bytes(data)))
        at = offset + rng.choice([96, 104, 108, 112, 120])
        data[at : at + 8] = rng.randbytes(8)

    edit(pick(folder, ".idx", rng), change)
    return 0


def damaged(rng: random.Random, name: str, folder: Path, rights: list[str]) -> int:
    """Applies a mutation. `restore` undoes those of the environment."""
    if name == "full_disk":
        rights.append(name)
        limit = rng.choice([0, 100, 5000, 20000])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return 0
    if name == "read_only":
        rights.append(name)
        for path in (*folder.iterdir(), folder):
            path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:  # whom rights do not hold back
            os.seteuid(65534)
        return 0
    return MUTATIONS[name](folder, rng)


def restore(rights: list[str]) -> None:
    if "full_disk" in rights:
        infinity = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (infinity, infinity))
    if "read_only" in rights and os.getuid() == 0:
        os.seteuid(0)


def open_store(folder: Path) -> PageStore:
    return PageStore(folder, numerics=NUMERICS, segment="48KiB")


def make_template(folder: Path) -> list[Page]:
    pages = chain("one", 6, 3000, tail=10) + chain("two", 4, 5000, tail=63, groups=2)
    pages += chain("three", 3, 9000, tail=1)
    with open_store(folder) as store:
        for page in pages:
            assert store.write(page)
    return pages


def case(name: str, template: Path, folder: Path, pages: list[Page], rng: random.Random) -> None:
    shutil.copytree(template, folder)
    if os.geteuid() == 0:
        folder.chmod(0o755)
    early = rng.random() < 0.5
    rights: list[str] = []
    store = open_store(folder) if early else None
    if store and rng.random() < 0.5:
        check(store, pages)
    try:
        may_miss = damaged(rng, name, folder, rights)
        store = store or open_store(folder)
        there = check(store, pages)
        missing = there.count(False)
        assert missing <= may_miss, f"{missing} pages are missing, expected at most {may_miss}"
        for token_ids in ([0, 1, 2], [0] * 64):
            for salt in ("one", "two", "three"):
                store.find_prefix(root_key(FINGERPRINT, salt), token_ids)
        more = chain("more", 3, 2500)
        taken = [store.write(page) for page in more]
        store.maintain()
        store.refresh()
        if not rights:
            assert all(taken), "the store does not take pages any more"
            assert all(check(store, more)), "new pages are gone"
        check(store, pages)
        verified = store.verify()
        assert verified.good == store.stats()["pages"], f"{verified}, {store.stats()}"
        store.close()
    finally:
        restore(rights)
    with open_store(folder) as again:
        for known, now in zip(check(again, pages), there, strict=True):
            assert now or not known or early or rights, "a page that was damaged is there again"
        check(again, more)
        again.retain_only([])
        again.maintain()
        again.maintain()
        assert again.stats()["pages"] == 0


def work(count: int, seed: int, only: str | None) -> int:
    """Runs the cases, prints those that fail and returns their number."""
    scratch = Path(tempfile.mkdtemp(prefix="page-mutations-"))
    if os.geteuid() == 0:
        scratch.chmod(0o755)
    template = scratch / "template"
    pages = make_template(template)
    names = [only] if only else [*MUTATIONS, "full_disk", "read_only"]
    failures = 0
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        name = names[i % len(names)]
        try:
            case(name, template, scratch / str(i), pages, rng)
        except Exception as error:
            failures += 1
            print(f"case {i}, {name}: {type(error).__name__}: {error}", flush=True)
        shutil.rmtree(scratch / str(i), ignore_errors=True)
    shutil.rmtree(scratch)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[*MUTATIONS, "full_disk", "read_only"])
    options = parser.parse_args()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    failures = work(options.count, options.seed, options.only)
    print(
        f"page_mutations: N {options.count}, seed {options.seed}, failures {failures}, "
        f"95 % bound {3 / max(1, options.count):.2g}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
