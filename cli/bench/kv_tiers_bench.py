"""The time to the first token of a turn by where the keys and values of its past are."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turbomind import Engine, Generation, Handle, Stream
from turbomind.errors import InternalError, InvalidRequest
from turbomind.loading.loader import ModelInfo

from .. import facts
from . import restart_process
from .disk import (
    ReadProbe,
    check_folder,
    disk_facts,
    drop_files,
    resident_share,
    scratch,
    warm_files,
)
from .measure import GREEDY, first_token

PLACES = {
    "kept": "device",
    "host": "host memory",
    "disk_warm": "disk, cached files",
    "disk_dropped": "disk, dropped files",
    "restart": "restart, dropped files",
    "process": "restart, new process",
    "again": "nowhere",
}
FROM_DISK = ("disk_warm", "disk_dropped", "restart", "process")
SALT, AGAIN = "bench", "again"
OF_BANDWIDTH = 0.8  # of the disk's read bandwidth that a restore is measured against
SESSIONS = 20  # that the predictions are tried on
SHORTEST = 128  # tokens of the shortest of them
FLUSH = 120.0  # seconds for the background to write a session


@dataclass(frozen=True)
class Plan:
    """A turn of `new_tokens` behind `context` tokens, `rounds` times; `resumes` more turns behind
    shorter pasts to try the predictions on. `folder`: where the pages go, None: temporary files."""

    context: int
    new_tokens: int
    rounds: int
    resumes: int
    folder: str | None

    def check(self, max_context: int) -> None:
        """Raises InvalidRequest when the turn would not fit in `max_context` tokens, or the folder
        is none."""
        check_folder(self.folder)
        if self.context < 2:
            raise InvalidRequest(f"--context is {self.context}, expected 2 or more, or 0 for none")
        longest = self.context + self.new_tokens + 1
        if longest > max_context:
            raise InvalidRequest(
                f"--context: a turn of {longest} tokens, expected at most {max_context}: lower it, "
                "or raise --max-context-tokens or --cache-memory"
            )


@dataclass(frozen=True)
class First:
    """A first token: its seconds, what `predict_ttft` had said, the prompt's tokens, those of them
    that were not computed, and of these the ones that came up from a lower tier."""

    seconds: float
    predicted: float
    prompt: int
    reused: int
    loaded: int

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return abs(self.predicted / self.seconds - 1)


@dataclass
class Samples:
    """What was measured, an entry per round: first tokens by place, the disk's bytes per second,
    seconds to open the engine, the share of the files in the page cache for "disk_warm"."""

    places: dict[str, list[First]] = field(default_factory=lambda: {name: [] for name in PLACES})
    read: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)  # whether it could be seen that files left
    tried: list[First] = field(default_factory=list)  # for the predictions alone


def measure(info: ModelInfo, plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Everything as one JSON-able report. Times in seconds."""
    with scratch(plan.folder) as folder:
        run = Run(info, plan, options, folder)
        run.rounds()
        run.predictions()
        return {**report(run.found, plan, run.kv_bytes), **disk_facts(folder)}


class Run:
    """A folder of pages, and engines that are opened on it one after the other."""

    def __init__(self, info: ModelInfo, plan: Plan, options: dict[str, Any], folder: Path) -> None:
        self._info, self._plan, self._options = info, plan, options
        self._pages = folder / "pages"
        self._random = np.random.default_rng(0)
        # The last token of the past is a reply's, computed with the turn after it.
        self.kv_bytes = facts.kv_read_bytes(info.description, info.kv_dtype, plan.context - 2)
        self._probe = ReadProbe(folder, self.kv_bytes)
        self.found = Samples()

    def rounds(self) -> None:
        """Each place once per round, next to the disk's bandwidth."""
        with self._open() as engine:
            self._plan.check(engine.max_context)
            history = self._store(engine, self._plan.context)
        for _ in range(self._plan.rounds):
            self._host_round()
            self._disk_round(history)
            self.found.places["process"].append(self._own_process(history))

    def predictions(self) -> None:
        """Turns behind pasts of many lengths, from files that are dropped each time."""
        count = self._plan.resumes
        longest = self._plan.context
        lengths = np.geomspace(min(SHORTEST, longest), longest, min(SESSIONS, count)).astype(int)
        if not count:
            return
        with self._open() as engine:
            stored = [self._store(engine, int(length)) for length in lengths]
        with self._open() as engine:
            for index in range(count):
                self._drop()
                # 7 and SESSIONS have no common divisor: long and short ones by turns.
                handle, first = self._resume(engine, stored[index * 7 % len(stored)])
                self.found.tried.append(first)
                _leave(engine, handle)

    # --- a round ---------------------------------------------------------------------------------

    def _host_round(self) -> None:
        """A session on an engine whose only lower tier is memory."""
        pages = -(-self._plan.context // facts.PAGE_TOKENS) + 4
        size = 2 * pages * facts.page_bytes(self._info.description, self._info.kv_dtype)
        with Engine(self._info.path, **{**self._options, "host_memory": size}) as engine:
            history = self._store(engine, self._plan.context)
            handle, first = self._resume(engine, history)
            self.found.places["host"].append(first)
            handle.close()

    def _disk_round(self, history: list[int]) -> None:
        """A restart, the turn again on what that left, from files warm and dropped, computed."""
        places = self.found.places
        rate, seen = self._probe.measure()
        self.found.read.append(rate)
        self.found.dropped.append(seen)
        self._drop()
        begin = time.perf_counter()
        with self._open() as engine:
            self.found.opened.append(time.perf_counter() - begin)
            self._drop()  # what opening has read
            handle, first = self._resume(engine, history)
            places["restart"].append(first)
            places["kept"].append(self._kept(engine, handle, history))
            _leave(engine, handle)
            warm_files(self._pages)  # what was read for the first time has gone past the cache
            self.found.warm.append(resident_share(self._pages))
            handle, first = self._resume(engine, history)
            places["disk_warm"].append(first)
            _leave(engine, handle)
            self._drop()
            handle, first = self._resume(engine, history)
            places["disk_dropped"].append(first)
            _leave(engine, handle)
            places["again"].append(self._again(engine, history))

    def _resume(self, engine: Engine, history: list[int]) -> tuple[Handle, First]:
        """The next turn of a session that was just opened."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=SALT)
        handle = engine.open(salt=SALT, persist=True)
        handle.append(history + new)
        return handle, _first(lambda: handle.generate(max_new_tokens=1, **GREEDY), predicted)

    def _kept(self, engine: Engine, handle: Handle, history: list[int]) -> First:
        """As a session asks: the handle's sequence becomes its past and the new tokens."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=SALT)
        return _first(
            lambda: handle.advance(len(history), new, max_new_tokens=1, **GREEDY), predicted
        )

    def _again(self, engine: Engine, history: list[int]) -> First:
        """Under another salt, so that nothing of it is found; nothing of it is written."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=AGAIN)
        prompt = history + new
        return _first(
            lambda: engine.stream(prompt, max_new_tokens=1, salt=AGAIN, **GREEDY), predicted
        )

    def _own_process(self, history: list[int]) -> First:
        """The turn after a restart in a process of its own."""
        asked = {
            "model": str(self._info.path),
            "options": {**self._options, "page_folder": str(self._pages)},
            "history": history,
            "new": self._ids(self._plan.new_tokens),
            "salt": SALT,
        }
        code = f"import runpy; runpy.run_path({restart_process.__file__!r}, run_name='__main__')"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            if process.stdout.readline() != "open\n":
                raise InternalError("the process that was to restore a session has failed")
            self._drop()
            process.stdin.write("go\n")
            process.stdin.flush()
            return First(**json.loads(process.stdout.readline()))

    # --- sessions --------------------------------------------------------------------------------

    def _open(self) -> Engine:
        return Engine(self._info.path, **{**self._options, "page_folder": str(self._pages)})

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._info.description.vocab, count).tolist()
        return ids

    def _store(self, engine: Engine, tokens: int) -> list[int]:
        """A session of so many tokens, which are returned; only the lower tiers have it."""
        handle = engine.open(salt=SALT, persist=True)
        handle.append(self._ids(tokens - 1))
        handle.generate(max_new_tokens=1, **GREEDY).result()
        history = handle.token_ids
        handle.close(save=True)
        _flush(engine)
        engine.evict()
        return history

    def _drop(self) -> None:
        self.found.dropped.append(drop_files(self._pages).verified)


def _first(ask: Callable[[], Stream], predicted: float) -> First:
    done: Generation
    seconds, done = first_token(ask)
    return First(seconds, predicted, done.prompt_tokens, done.reused_tokens, done.loaded_tokens)


def _leave(engine: Engine, handle: Handle) -> None:
    """Nothing of the handle is on the device afterwards, and nothing is being written."""
    handle.close()
    _flush(engine)
    engine.evict()


def _flush(engine: Engine) -> None:
    if not engine.flush_pages(FLUSH):
        raise InternalError(f"pages were not written within {FLUSH:.0f} seconds")


# --- the report ----------------------------------------------------------------------------------


def report(found: Samples, plan: Plan, kv_bytes: int) -> dict[str, Any]:
    """Medians over the rounds, and the samples they are of; ratios are of the same round."""
    rows = {name: _row(name, firsts) for name, firsts in found.places.items()}
    bounds = [
        bound_seconds(kv_bytes, rate, kept.seconds)
        for rate, kept in zip(found.read, found.places["kept"], strict=True)
    ]
    return {
        "context": plan.context,
        "new_tokens": plan.new_tokens,
        "rounds": plan.rounds,
        "kv_bytes": kv_bytes,
        "read_bytes_per_second": statistics.median(found.read),
        "read_samples": found.read,
        "bound_seconds": statistics.median(bounds),
        "dropped_verified": all(found.dropped),
        "warm_share": statistics.median(found.warm),
        "open_seconds": statistics.median(found.opened),
        "rows": list(rows.values()),
        "over_bound": {
            name: _ratio([first.seconds for first in found.places[name]], bounds)
            for name in FROM_DISK
        },
        "again_over": {
            name: _ratio(
                [first.seconds for first in found.places["again"]],
                [first.seconds for first in firsts],
            )
            for name, firsts in found.places.items()
            if name != "again"
        },
        "predictions": _predictions(found.tried),
    }


def bound_seconds(kv_bytes: int, bytes_per_second: float, kept_seconds: float) -> float:
    """What a restore should take: its bytes at OF_BANDWIDTH of the disk's, then the kept turn."""
    return kv_bytes / (OF_BANDWIDTH * bytes_per_second) + kept_seconds


def _row(name: str, firsts: list[First]) -> dict[str, Any]:
    return {
        "from": name,
        "seconds": statistics.median(first.seconds for first in firsts),
        "predicted_seconds": statistics.median(first.predicted for first in firsts),
        "prediction_error": statistics.median(first.error for first in firsts),
        "computed_tokens": max(first.prompt - first.reused for first in firsts),
        "loaded_tokens": min(first.loaded for first in firsts),
        "samples": [first.seconds for first in firsts],
    }


def _ratio(upper: list[float], lower: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(upper, lower, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _predictions(tried: list[First]) -> dict[str, Any]:
    """How far off the predictions were; empty when none were tried."""
    if not tried:
        return {}
    return {
        "resumes": len(tried),
        "shortest_prompt": min(first.prompt for first in tried),
        "longest_prompt": max(first.prompt for first in tried),
        "median_error": statistics.median(first.error for first in tried),
        "samples": [
            {"prompt_tokens": t.prompt, "seconds": t.seconds, "predicted_seconds": t.predicted}
            for t in tried
        ],
    }
