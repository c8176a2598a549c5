"""Counts the tokens that a turn computes again after a kill in the turn before it.

    python -m tests.stress.kill_cost --kills 200 --seed 1
    python -m tests.stress.kill_cost --kills 200 --seed 1 --wait 0.05
    python -m tests.stress.kill_cost --kills 200 --seed 1 --settle

A session continues through processes, each forked from a warm parent. Each process reports how many
tokens of the conversation have no page on disk, asks a question and is killed: during the prefill
of the prompt, or after some piece of the reply was shown. With --settle the full pages are written
before the kill, so at most one unfinished page may be missing. Without it the report counts how
often and how much more was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from chat_models import chat_model  # noqa: E402

import conftest  # noqa: E402, F401 - maps cli/ where nothing is installed
import lmchat  # noqa: E402
from lmchat.store.prefixes import PAGE  # noqa: E402
from tests.stress.session_kill import forked, read_until  # noqa: E402

TURNS = 20  # of a session
CONTEXT = 20_000
PATIENCE = 60.0  # seconds for a child
NO_END = {0: -100.0, 2: -100.0}
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 400, "logit_bias": NO_END}
OPTIONS: dict[str, Any] = {"threads": 1, "cache_memory": "64MiB"}


@dataclass(frozen=True)
class Kill:
    """Time of a kill: after `shown` pieces of the reply, or `seconds` after the question."""

    words: int  # of its question
    shown: int = 0
    seconds: float = 0.0
    settle: bool = False
    wait: float = 0.0  # seconds from then on


def random_kill(rng: random.Random, **more: Any) -> Kill:
    words = rng.choice([1, 20, 100, 400])
    if rng.random() < 0.2:
        return Kill(words, seconds=rng.choice([0.0, 0.002, 0.01, 0.05]), **more)
    return Kill(words, shown=rng.randint(1, 150), **more)


def chat(model: Path, data_dir: Path, kill: Kill, out: int) -> None:
    """Writes the number of tokens that are not on disk to `out`, asks, and kills itself."""
    engine = lmchat.ChatEngine(model, store=data_dir, **OPTIONS)
    session = engine.session("trip")
    ids = session.token_ids
    lacks = len(ids) - engine.core.residence(ids, session.owner).disk
    os.write(out, (json.dumps(lacks) + "\n").encode())
    left = [kill.shown]
    generation = session.start_send("word " * kill.words, **SETTINGS)

    def die() -> None:
        if kill.settle:
            engine.core.flush_pages()
        time.sleep(kill.wait)
        os.kill(os.getpid(), signal.SIGKILL)

    one = threading.Lock()

    def show() -> None:  # on the reader's thread, so that nothing is journalled meanwhile
        with one:
            for part in follower.take():
                if not isinstance(part, lmchat.Delta) or not part.text:
                    continue
                left[0] -= 1
                if left[0] == 0:
                    die()

    if not kill.shown:
        time.sleep(kill.seconds)
        engine._runtime.session_reader.call(die)
    follower = generation.follow()
    generation.listen(show)
    generation.wait()
    die()  # it was shorter


def missing_after_kills(count: int, seed: int, **more: Any) -> list[int]:
    """Returns the number of tokens without a page on disk after each kill."""
    rng, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model(Path(folder) / "model", context=CONTEXT)
        for number in range(count):
            data_dir = Path(folder) / f"data{number // TURNS}"
            kill = random_kill(rng, **more)

            def work(out: int, data_dir: Path = data_dir, kill: Kill = kill) -> None:
                chat(model, data_dir, kill, out)

            with forked(work) as (pid, reading):
                printed = read_until(reading, time.monotonic() + PATIENCE)
                os.kill(pid, signal.SIGKILL)
            if printed and number % TURNS:
                found.append(int(printed))
            assert printed, f"kill {number} of seed {seed}: nothing was shown"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    found = missing_after_kills(
        options.kills, options.seed, settle=options.settle, wait=options.wait
    )
    pages = Counter(max(0, -(-again // PAGE) - 1) for again in found)
    lost = ", ".join(f"{number} in {count}" for number, count in sorted(pages.items()))
    print(f"{options.kills} kills, seed {options.seed}, {len(found)} turns after one: full pages "
          f"lost: {lost}; most tokens {max(found, default=0)}")  # fmt: skip
    sys.exit(options.settle and max(found, default=0) > PAGE)


if __name__ == "__main__":
    main()
