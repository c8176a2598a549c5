"""Kills processes that write, remove and compact pages, and checks what they leave.

    python -m tests.stress.page_kills --count 10000

In each case two processes work on one folder until SIGKILL ends them at random moments, while a
third instance reads. Afterwards every page is absent or exactly right. Pages whose write was
acknowledged are present unless their removal had begun, and a few rounds of maintenance leave few
files. Ten cases follow each other in one folder.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.support.stored_pages import NUMERICS, chain, check
from turbomind.engine.pages import Page, PageStore

SEGMENT = 64 << 10  # small, so that they fill up and are compacted all the time
WRITTEN, REMOVING = b"w", b"r"


def open_store(folder: Path) -> PageStore:
    return PageStore(folder, numerics=NUMERICS, segment=SEGMENT)


def work(folder: Path, pages: list[Page], seed: int, report: int) -> None:
    """Works until it is killed. Reports (event, index of the page) in two bytes each."""
    rng = random.Random(seed)
    store = open_store(folder)
    while True:
        action = rng.random()
        index = rng.randrange(len(pages))
        if action < 0.6:
            if store.write(pages[index]):
                os.write(report, WRITTEN + bytes([index]))
        elif action < 0.8:
            os.write(report, REMOVING + bytes([index]))
            store.remove([pages[index].key])
        elif action < 0.9:
            store.maintain()
        elif action < 0.95:
            check(store, [pages[index]])
        elif action < 0.97:
            store.sync()
        else:
            store.close()
            store = open_store(folder)


def start(folder: Path, pages: list[Page], seed: int) -> tuple[int, int]:
    """Starts a worker. Returns its process id and the descriptor of its reports."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            work(folder, pages, seed, writer)
        except BaseException as error:
            os.write(2, f"worker: {error!r}\n".encode())
        os._exit(1)
    os.close(writer)
    return process, reader


def finish(process: int, reader: int) -> bytes:
    """Kills a worker and returns its reports."""
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), f"the worker ended by itself with status {status}"
    reports = b""
    while chunk := os.read(reader, 1 << 16):
        reports += chunk
    os.close(reader)
    return reports


def case(folder: Path, sets: list[list[Page]], sure: list[set[int]], rng: random.Random) -> None:
    """Kills each worker once. `sure` has the indices of pages that must be present."""
    watcher = open_store(folder)
    workers = [start(folder, pages, rng.getrandbits(32)) for pages in sets]
    time.sleep(rng.random() * 0.03)
    for pages in sets:
        check(watcher, pages[:5])
    everything = [finish(*worker) for worker in workers]
    for present, reports in zip(sure, everything, strict=True):
        for event, index in zip(reports[::2], reports[1::2], strict=True):
            if bytes([event]) == WRITTEN:
                present.add(index)
            else:  # the pages that follow it go too
                present -= {i for i in present if i >= index}
    watcher.refresh()
    with open_store(folder) as store:
        for reader in (store, watcher):
            for pages, present in zip(sets, sure, strict=True):
                there = check(reader, pages)
                lost = [i for i in present if not there[i]]
                assert not lost, f"acknowledged pages {lost} are not there"
            assert reader.stats()["damaged"] == 0, f"damaged: {reader.stats()}"
        for _ in range(4):
            store.maintain()
        stats = store.stats()
        assert stats["disk_bytes"] <= 3 * stats["bytes"] + 6 * SEGMENT, f"too large: {stats}"
        assert len(list(folder.iterdir())) == 2 * stats["segments"], "files without a segment"
    watcher.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    sets = [
        [page for i in range(5) for page in chain(f"{owner} {i}", 8, 1500 + 1700 * i)]
        for owner in range(2)
    ]
    failures = 0
    scratch = Path(tempfile.mkdtemp(prefix="page-kills-"))
    sure: list[set[int]] = [set(), set()]
    for i in range(options.count):
        folder = scratch / f"{i // 10}"
        if i % 10 == 0:
            sure = [set(), set()]
            shutil.rmtree(scratch / f"{i // 10 - 1}", ignore_errors=True)
        try:
            case(folder, sets, sure, rng)
        except AssertionError as error:
            failures += 1
            print(f"case {i}: {error}", flush=True)
    shutil.rmtree(scratch)
    print(
        f"page_kills: N {options.count}, seed {options.seed}, failures {failures}, "
        f"95 % bound {3 / max(1, options.count):.2g}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
