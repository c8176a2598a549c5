"""Kills a process with SIGKILL in the middle of a chat, and checks that nothing seen is lost.

    python -m tests.stress.session_kill --count 10000 --seed 1
    python -m tests.stress.session_kill --count 500 --seed 1 --real

Store, journal, engine, page files and session code are real. Only the arithmetic is not: the tokens
come from a model that checks every page it reads. A child, forked from a warm parent, opens a data
directory, chats, edits, forks, undoes, stops, compacts and closes. It reports through a pipe what
it finds, begins and shows, and what was acknowledged. After the kill the next child opens the same
directory. Every session is then as it was before or after the interrupted step, with all text that
was shown, and every reply follows the model's rule. Some children die while they open and recover
the directory, some of these with a store of version 1. With --real each child is a fresh process
with the model that ships.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from scripted_rule import ScriptedRule  # noqa: E402

import conftest  # noqa: E402, F401 - maps cli/ where nothing is installed
import turbomind  # noqa: E402
from lmchat.bundled import FOLDER  # noqa: E402
from lmchat.store.sqlite.sqlite_store import SqliteStore  # noqa: E402
from tests.stress import chatter  # noqa: E402
from tests.stress.store_kill import downgrade  # noqa: E402
from tests.stress.witness import Witness, Wrong  # noqa: E402
from turbomind.engine.pages import PageStore  # noqa: E402
from turbomind.settings import SAMPLING  # noqa: E402

KILLS_PER_DATA_DIR = 25
EARLY = 0.2  # of the kills come at any moment from the start of the process
MIGRATIONS = 0.3  # of these find a store of version 1
PATIENCE = 60.0  # seconds for a child to look
EOS = turbomind.loading.loader.describe(FOLDER).eos_token_ids
Process = AbstractContextManager[tuple[int, int]]
CHILDREN = {"chat": chatter.chat, "look": chatter.look}


# --- one child ----------------------------------------------------------------------------------


def started(work: str, data_dir: Path, seed: int, real: bool) -> Process:
    """Starts a child that chats or only reports."""
    if not real:
        return forked(lambda out: in_child(work, data_dir, seed, out))

    def start(_reading: int, out: int) -> int:
        os.set_inheritable(out, True)
        command = [sys.executable, __file__, "--child", work, "--data-dir", str(data_dir)]
        command += ["--seed", str(seed), "--out", str(out)]
        return subprocess.Popen(command, close_fds=False).pid

    return process(start)


def forked(work: Callable[[int], None]) -> Process:
    """Forks a child that does `work` with a pipe to write to."""

    def start(reading: int, out: int) -> int:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            work(out)
            os._exit(0)
        return pid

    return process(start)


@contextlib.contextmanager
def process(start: Callable[[int, int], int]) -> Iterator[tuple[int, int]]:
    """Yields (pid, pipe) of the process that `start` starts, and kills it at the end."""
    reading, writing = os.pipe()
    pid = start(reading, writing)
    os.close(writing)
    try:
        yield pid, reading
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def in_child(work: str, data_dir: Path, seed: int, out: int) -> None:
    try:
        CHILDREN[work](data_dir, seed, out)
    except BaseException as error:
        os.write(out, (json.dumps(["error", repr(error)]) + "\n").encode())


def read_until(reading: int, deadline: float, until: bytes | None = None) -> bytes:
    """Returns what arrives before the deadline, `until`, or the end."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        more = os.read(reading, 1 << 16)
        if not more:
            break
        data += more
        if until is not None and until in data[-len(more) - len(until) :]:
            break
    return data


# --- the cases ---------------------------------------------------------------------------------


class EngineRule:
    """Replies of the model that ships, computed by an engine without pages on disk."""

    def __init__(self) -> None:
        self._engine = turbomind.Engine(FOLDER, threads=1)

    def wrong(
        self, prompt: Sequence[int], reply: Sequence[int], settings: Mapping[str, Any]
    ) -> str | None:
        """Returns what is wrong with a reply, as `ScriptedRule.wrong` does."""
        limits = ("max_new_tokens", "min_new_tokens")
        params = {k: v for k, v in settings.items() if k in SAMPLING and k not in limits}
        found, known, least = list(reply), 0, 0
        while known < len(found):
            made = self._engine.generate(
                [*prompt, *found[:known]],
                max_new_tokens=len(found) - known,
                min_new_tokens=least,
                **params,
            )
            expected = [*found[:known], *made.token_ids]
            if expected == found:
                return None
            known = len(expected) - 1
            if made.finish_reason != "stop" or found[:known] != expected[:-1]:
                return f"{found}, expected {expected}"
            least = 1  # the stop token was taken off by `continue_()`
        return None


class StressRun:
    """Kills processes and collects what was lost in `failures`."""

    def __init__(self, seed: int, real: bool) -> None:
        self.seed, self.real = seed, real
        self.failures: list[str] = []
        self.killed: Counter[str] = Counter()  # in the middle of what
        self.verified = self.loaded = 0  # replies, and tokens they had from the disk
        self._rng = random.Random(seed)
        self._wrong: Wrong = EngineRule().wrong if real else ScriptedRule(chatter.VOCAB, EOS).wrong
        self._opening, self._longest = (1.5, 0.4) if real else (0.05, 0.1)  # seconds to the kill

    def run(self, count: int) -> None:
        for first in range(0, count, KILLS_PER_DATA_DIR):
            data_dir = Path(tempfile.mkdtemp(prefix="kill-"))
            witness = Witness(self._wrong)
            for case in range(first, min(first + KILLS_PER_DATA_DIR, count)):
                self._kill(data_dir, witness)
                self._collect(witness, f"case {case}")
            self._finish(data_dir, witness)
            self._collect(witness, f"the end of case {case}")
            self.verified += witness.verified
            self.loaded += witness.loaded
            shutil.rmtree(data_dir, ignore_errors=True)

    def _collect(self, witness: Witness, where: str) -> None:
        self.failures += [f"{where} (seed {self.seed}): {p}" for p in witness.problems]
        witness.problems.clear()

    def _kill(self, data_dir: Path, witness: Witness) -> None:
        """Starts one process and kills it."""
        early = self._rng.random() < EARLY
        old = early and (data_dir / "sessions.db").exists() and self._rng.random() < MIGRATIONS
        if old:
            downgrade(data_dir)
        wait = self._rng.random() * self._opening if early else self._rng.random() ** 2
        with started("chat", data_dir, self._rng.getrandbits(30), self.real) as (pid, reading):
            printed = b""
            if not early:
                printed = read_until(reading, time.monotonic() + PATIENCE, b'["looked"]\n')
                wait *= self._longest
            printed += read_until(reading, time.monotonic() + wait)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            printed += read_until(reading, time.monotonic() + PATIENCE)
        witness.read(printed)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            witness.problems.append(f"the process ended by itself, with status {status}")
        if not early and not witness.looked:
            witness.problems.append("the process did not look at all sessions in time")
        opening = "migration" if old else "opening"
        self.killed[witness.step.verb if witness.looked else opening] += 1

    def _finish(self, data_dir: Path, witness: Witness) -> None:
        """Reports once more and checks everything in the directory."""
        with started("look", data_dir, 0, self.real) as (_pid, reading):
            printed = read_until(reading, time.monotonic() + PATIENCE, b'["closed"]\n')
        witness.read(printed)
        if not printed.endswith(b'["closed"]\n'):
            witness.problems.append("the last process did not come to its end")
        store = SqliteStore(data_dir)
        witness.problems += [f"the store: {problem}" for problem in store.verify()]
        store.close()
        with PageStore(data_dir / "pages") as pages:
            damaged = pages.verify().damaged
            if damaged:
                witness.problems.append(f"{damaged} pages are damaged")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="fresh processes, the model that ships")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--data-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        in_child(options.child, options.data_dir, options.seed, options.out)
        return
    if not options.real:
        chatter.warm_up()
        assert threading.active_count() == 1, "a parent with threads cannot fork"
    begun, cases = time.monotonic(), StressRun(options.seed, options.real)
    cases.run(options.count)
    for failure in cases.failures[:20]:
        print(failure)
    print(
        f"{options.count} kills, seed {options.seed}: {len(cases.failures)} failures"
        + (f", so below {3 / options.count:.1e} each (95 %)" if not cases.failures else "")
        + f"; {cases.verified} replies verified, {cases.loaded} of their tokens loaded from disk"
        + f"; under way: {dict(sorted(cases.killed.items()))}"
        + f"; {time.monotonic() - begun:.0f} s"
    )
    sys.exit(bool(cases.failures))


if __name__ == "__main__":
    main()
