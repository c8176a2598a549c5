"""Pages on a disk through `turbomind.engine.pages`; the tier itself is tested by disk_tier_test."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stored_pages
from assets import ROOT
from stored_pages import FINGERPRINT, NUMERICS, chain, check

from turbomind import _C, EngineClosed, InvalidRequest
from turbomind.engine.pages import PINNED, Page, PageStore, page_keys, root_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made" / "pages"


def open_store(folder: Path, quota: int | str | None = None) -> PageStore:
    return PageStore(folder, quota, numerics=NUMERICS)


def stress(name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"tests.stress.{name}", *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    if os.access("/dev/shm", os.W_OK):  # syncing is free there
        environment["TMPDIR"] = "/dev/shm"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_written_page_is_read_unchanged(folder):
    pages = chain("", 5, tail=20, groups=2)
    with open_store(folder) as store:
        assert not any(store.contains([p.key for p in pages]))
        assert all(store.write(p) for p in pages)
        assert all(check(store, pages))
        assert [p.group for p in store.read(pages[0].key)] == [0, 1]
        assert store.bytes_of([pages[0].key]) > 2 * len(pages[0].payload)
        assert store.read(bytes(16)) == []
        store.sync()
    with open_store(folder) as store:
        assert all(check(store, pages))
        stats = store.stats()
        assert stats["pages"] == len(pages)
        assert stats["damaged"] == stats["write_errors"] == 0
        assert store.pages() == [(p.key, p.group) for p in pages]
        seen = []
        verified = store.verify(lambda done, total: seen.append((done, total)))
        assert (verified.good, verified.damaged) == (len(pages), 0)
        assert seen == [(i + 1, len(pages)) for i in range(len(pages))]


def test_files_are_readable_by_their_owner_only(folder):
    with open_store(folder) as store:
        assert store.write(chain("", 1)[0])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir()} == {0o600}


def test_keys_follow_from_tokens_and_root(folder):
    tokens = list(range(150))
    keys = page_keys(FINGERPRINT, tokens, "salt")
    parent, expected = root_key(FINGERPRINT, "salt"), []
    for i in range(0, 150, 64):
        parent = _C.page_key(parent, tokens[i : i + 64])
        expected.append(parent)
    assert keys == expected
    assert {len(k) for k in keys} == {16}
    assert page_keys(FINGERPRINT, tokens[:128], "salt") == keys[:2]
    assert page_keys(FINGERPRINT, []) == []
    roots = [root_key(*a) for a in [("m",), ("m", "s"), ("m", "", 1), ("ms",)]]
    assert len(set(roots)) == 4


def test_pages_move_between_folders(folder, tmp_path):
    pages = chain("", 4, tail=9)
    with open_store(folder) as store, open_store(tmp_path / "other") as other:
        assert all(store.write(p) for p in pages)
        for key in page_keys(FINGERPRINT, [t for p in pages for t in p.token_ids]):
            assert all(other.write(p) for p in store.read(key))
        assert all(check(other, pages))


def test_removal_takes_the_following_pages_along(folder):
    mine, yours = chain("mine", 6, tail=5), chain("yours", 6, tail=5)
    with open_store(folder) as store, open_store(folder) as other:
        assert all(store.write(p) for p in mine)
        assert all(other.write(p) for p in yours)
        store.remove([yours[0].key])  # and all pages that follow it
        other.refresh()
        for reader in (store, other):
            assert check(reader, yours) == [False] * 7
            assert check(reader, mine) == [True] * 7
        other.retain_only([p.key for p in mine[:3]])
        store.refresh()
        assert check(store, mine) == [True] * 3 + [False] * 4
        assert store.stats()["damaged"] == other.stats()["damaged"] == 0
        store.retain_only([])
    with open_store(folder) as store:
        store.maintain()
        assert store.stats()["disk_bytes"] == 0


def test_eviction_for_a_full_disk(folder):
    """The least valuable pages leave, but none that is needed, nor those before it."""
    low, high = chain("low", 4), chain("high", 4)
    with open_store(folder) as store, open_store(folder) as other:
        assert all(store.write(p) for p in (*high, *low))
        store.touch([p.key for p in high], 1.0)
        store.sync()
        size = store.bytes_of([low[0].key])
        assert other.evict(1) == size
        assert check(other, low) == [True, True, True, False]
        assert other.evict(100 * size, [low[1].key]) == 5 * size
        assert check(other, low) == [True, True, False, False]
        assert check(store, high) == [False] * 4  # the other instance notices
        assert other.evict(1 << 40) == 2 * size
        assert other.evict(1) == 0
        assert store.stats()["damaged"] == 0


def test_quota_spares_pinned_pages(folder):
    pinned, plain = chain("pinned", 4), chain("plain", 20)
    with open_store(folder, 60_000) as store:
        assert all(store.write(p) for p in pinned)
        store.touch([p.key for p in pinned], PINNED)
    with open_store(folder, 60_000) as store:
        for p in plain:
            store.write(replace(p, retention_priority=1.0))
        assert all(check(store, pinned))
        stats = store.stats()
        assert stats["quota"] == 60_000 >= stats["bytes"]
        assert stats["write_errors"] == 0
    with open_store(folder, "8KiB") as store:
        while store.stats()["bytes"] > 8192:
            store.maintain()
        there = check(store, pinned)
        assert there[0]  # first pages are evicted last
        assert not any(check(store, plain))


def common(a: list[int], b: list[int]) -> int:
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def test_find_prefix_returns_the_longest_common_prefix(folder):
    rng = random.Random(3)
    root = root_key(FINGERPRINT)
    written: list[list[int]] = []
    with open_store(folder) as store:
        for _ in range(100):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            written.append(tokens)
            assert store.write(stored_pages.page(root, tokens, 100))
        for _ in range(200):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            longest = max(common(tokens, w) for w in written)
            found = store.find_prefix(root, tokens)
            assert (found[1] if found else 0) == longest
            if found:
                [page] = store.read(found[0])
                assert page.token_ids[:longest] == tokens[:longest]


def test_the_checksum_follows_its_specification(folder):
    """Checks checksums of records and payloads by a second implementation."""
    page = chain("", 1, tail=3)[-1]
    with open_store(folder) as store:
        assert store.write(page)
        [index] = folder.glob("*.idx")
        data = index.read_bytes()
        assert stored_pages.xxh64(b"abc") == 0x44BC2CF5AD770999
        assert int.from_bytes(data[56:64], "little") == stored_pages.xxh64(data[:56])
        offset = (64 * 0x9E3779B97F4A7C15) & (1 << 64) - 1
        head = stored_pages.xxh64(data[64:152], int(index.stem, 16) ^ offset)
        record = stored_pages.xxh64(data[192:], head)
        assert int.from_bytes(data[152:160], "little") == record


@pytest.mark.parametrize(
    "change",
    [
        {"key": bytes(16)},
        {"token_ids": []},
        {"token_ids": [1] * 65},
        {"payload": b""},
        {"group": -1},
        {"heads": -1},
        {"retention_priority": float("nan")},
        {"fingerprint": "x" * 256},
        {"parent": b"short"},
    ],
)
def test_wrong_pages_are_refused(folder, change):
    page = replace(chain("", 1)[0], **change)
    if "token_ids" in change:
        page = replace(page, key=_C.page_key(page.parent, page.token_ids))
    with open_store(folder) as store:
        with pytest.raises(InvalidRequest):
            store.write(page)
        assert store.stats()["pages"] == 0


def test_wrong_arguments_are_refused(folder, tmp_path):
    (tmp_path / "file").touch()
    for wrong in ("", tmp_path / "file", tmp_path / "file" / "pages", "/proc/none"):
        with pytest.raises(InvalidRequest, match="page_folder"):
            PageStore(wrong)
    with pytest.raises(InvalidRequest, match="quota"):
        PageStore(folder, "much")
    store = open_store(folder)
    for call in (store.remove, store.retain_only, store.contains, store.bytes_of):
        with pytest.raises(InvalidRequest, match="16"):
            call([b"short"])
    store.close()
    store.close()
    with pytest.raises(EngineClosed, match="page store"):
        store.stats()


def test_damaged_pages_are_dropped_and_counted(folder):
    pages = chain("", 6)
    with open_store(folder) as store:
        assert all(store.write(p) for p in pages)
        [payloads] = folder.glob("*.kv")
        data = bytearray(payloads.read_bytes())
        data[2 * 4096 + 17] ^= 1
        payloads.write_bytes(data)
        verified = store.verify()
        assert (verified.good, verified.damaged) == (5, 1)
        assert check(store, pages) == [True, True, False, True, True, True]
        assert store.write(pages[2])
        assert all(check(store, pages))


def test_refresh_reads_pages_of_another_process(folder):
    """After refresh() the store has the writes and removals of another process."""
    code = """if True:
        import sys
        from stored_pages import chain
        from turbomind.engine.pages import PageStore
        store = PageStore(sys.argv[1], numerics="cpu/test/1")
        pages = chain("", 3)
        for page in pages:
            assert store.write(page)
        print("written", flush=True)
        sys.stdin.readline()
        store.remove([pages[2].key])
        print("removed", flush=True)
        sys.stdin.readline()
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pages: list[Page] = chain("", 3)
    with child, open_store(folder) as store:
        assert child.stdout.readline() == "written\n"
        store.refresh()
        assert check(store, pages) == [True] * 3
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "removed\n"
        store.refresh()
        assert check(store, pages) == [True, True, False]
        assert store.write(pages[2])  # to its own segment
        assert store.stats()["segments"] == 2
        child.stdin.write("\n")
        child.stdin.flush()


def test_pages_of_killed_writers_are_whole_or_missing():
    stress("page_kills", "--count", os.environ.get("PAGE_KILLS", "60"))


def test_damaged_folders_open_without_wrong_pages():
    stress("page_mutations", "--count", os.environ.get("PAGE_MUTATIONS", "210"))
