"""Measures the TTFT of a turn by the tier that holds the KV cache of its context."""

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
from turbomind.config import facts
from turbomind.errors import InternalError, InvalidRequest
from turbomind.loading.loader import ModelInfo

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
    "device": "device",
    "host": "host memory",
    "disk_warm": "disk, cached files",
    "disk_dropped": "disk, dropped files",
    "restart": "restart, dropped files",
    "process": "restart, new process",
    "again": "nowhere",
}
FROM_DISK = ("disk_warm", "disk_dropped", "restart", "process")
SALT, AGAIN = "bench", "again"
OF_BANDWIDTH = 0.8  # fraction of the disk's read bandwidth in the bound of a restore
SESSIONS = 20  # sessions for checking the predictions
SHORTEST = 128  # tokens of the shortest session
FLUSH = 120.0  # seconds until a session is written


@dataclass(frozen=True)
class Plan:
    """Parameters of the measurement.

    Attributes:
        context: Tokens before the measured turn.
        new_tokens: Tokens of the turn.
        rounds: Number of rounds.
        resumes: Turns after shorter contexts, to check the predictions.
        folder: Folder of the pages; None: temporary files.
    """

    context: int
    new_tokens: int
    rounds: int
    resumes: int
    folder: str | None

    def check(self, max_context: int) -> None:
        """Raises InvalidRequest if the turn does not fit in `max_context` tokens or the folder is
        invalid."""
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
    """Times and tokens of a first token.

    Attributes:
        seconds: Measured TTFT.
        predicted: TTFT predicted by `predict_ttft`.
        prompt: Tokens of the prompt.
        reused: Tokens of the prompt whose KV was reused.
        loaded: Reused tokens that were loaded from a lower tier.
    """

    seconds: float
    predicted: float
    prompt: int
    reused: int
    loaded: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted / self.seconds - 1)


@dataclass
class Samples:
    """Measured values, one per round.

    Attributes:
        places: First tokens, by place of the KV cache.
        read: Read bandwidth of the disk, in bytes per second.
        opened: Seconds to open the engine.
        warm: Cached fraction of the files for "disk_warm".
        dropped: Whether the files were verified as dropped.
        tried: First tokens that only check the predictions.
    """

    places: dict[str, list[First]] = field(default_factory=lambda: {name: [] for name in PLACES})
    read: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)
    tried: list[First] = field(default_factory=list)


def measure(info: ModelInfo, plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the measurement and returns a JSON-able report; times in seconds."""
    with scratch(plan.folder) as folder:
        run = Run(info, plan, options, folder)
        run.rounds()
        run.predictions()
        return {**report(run.found, plan, run.kv_bytes), **disk_facts(folder)}


class Run:
    """Measures with a folder of pages and engines that open it one after the other."""

    def __init__(self, info: ModelInfo, plan: Plan, options: dict[str, Any], folder: Path) -> None:
        self._info, self._plan, self._options = info, plan, options
        self._pages = folder / "pages"
        self._random = np.random.default_rng(0)
        # The KV of a reply's last token is computed with the next turn.
        self.kv_bytes = facts.kv_read_bytes(info.description, info.kv_dtype, plan.context - 2)
        self._probe = ReadProbe(folder, self.kv_bytes)
        self.found = Samples()

    def rounds(self) -> None:
        """Measures each place once per round, and the disk's bandwidth."""
        with self._open() as engine:
            self._plan.check(engine.max_context)
            history = self._store(engine, self._plan.context)
        for _ in range(self._plan.rounds):
            self._host_round()
            self._disk_round(history)
            self.found.places["process"].append(self._own_process(history))

    def predictions(self) -> None:
        """Measures turns after contexts of many lengths, with dropped files."""
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
                # 7 and SESSIONS are coprime, so that long and short contexts alternate.
                handle, first = self._resume(engine, stored[index * 7 % len(stored)])
                self.found.tried.append(first)
                _leave(engine, handle)

    # --- a round ---------------------------------------------------------------------------------

    def _host_round(self) -> None:
        """Measures a session on an engine whose only lower tier is host memory."""
        pages = -(-self._plan.context // facts.PAGE_TOKENS) + 4
        size = 2 * pages * facts.page_bytes(self._info.description, self._info.kv_dtype)
        with Engine(self._info.path, **{**self._options, "host_memory": size}) as engine:
            history = self._store(engine, self._plan.context)
            handle, first = self._resume(engine, history)
            self.found.places["host"].append(first)
            handle.close()

    def _disk_round(self, history: list[int]) -> None:
        """Measures a restart, the device, warm files, dropped files, and recomputation."""
        places = self.found.places
        rate, seen = self._probe.measure()
        self.found.read.append(rate)
        self.found.dropped.append(seen)
        self._drop()
        begin = time.perf_counter()
        with self._open() as engine:
            self.found.opened.append(time.perf_counter() - begin)
            self._drop()  # files read while opening
            handle, first = self._resume(engine, history)
            places["restart"].append(first)
            places["device"].append(self._on_device(engine, handle, history))
            _leave(engine, handle)
            warm_files(self._pages)  # restores bypass the OS page cache
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
        """Measures the next turn of a newly opened session."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=SALT)
        handle = engine.open(salt=SALT, persist=True)
        handle.append(history + new)
        return handle, _first(lambda: handle.generate(max_new_tokens=1, **GREEDY), predicted)

    def _on_device(self, engine: Engine, handle: Handle, history: list[int]) -> First:
        """Measures the next turn of an open handle, as a session submits it."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=SALT)
        return _first(
            lambda: handle.advance(len(history), new, max_new_tokens=1, **GREEDY), predicted
        )

    def _again(self, engine: Engine, history: list[int]) -> First:
        """Measures the turn without cached KV: another salt shares no pages."""
        new = self._ids(self._plan.new_tokens)
        predicted = engine.predict_ttft(history, len(new), salt=AGAIN)
        prompt = history + new
        return _first(
            lambda: engine.stream(prompt, max_new_tokens=1, salt=AGAIN, **GREEDY), predicted
        )

    def _own_process(self, history: list[int]) -> First:
        """Measures the turn after a restart, in a new process."""
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
                raise InternalError("the process that restores a session has failed")
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
        """Stores a session of that length in the lower tiers only, and returns its token ids."""
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
    """Closes the handle, waits for pending writes, and evicts its pages from the device."""
    handle.close()
    _flush(engine)
    engine.evict()


def _flush(engine: Engine) -> None:
    if not engine.flush_pages(FLUSH):
        raise InternalError(f"pages were not written within {FLUSH:.0f} seconds")


# --- the report ----------------------------------------------------------------------------------


def report(found: Samples, plan: Plan, kv_bytes: int) -> dict[str, Any]:
    """Returns medians over the rounds with their samples; ratios are of the same round."""
    rows = {name: _row(name, firsts) for name, firsts in found.places.items()}
    bounds = [
        bound_seconds(kv_bytes, rate, resident.seconds)
        for rate, resident in zip(found.read, found.places["device"], strict=True)
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


def bound_seconds(kv_bytes: int, bytes_per_second: float, cached_seconds: float) -> float:
    """Returns the bound of a restore: KV at OF_BANDWIDTH of the disk, plus the cached TTFT."""
    return kv_bytes / (OF_BANDWIDTH * bytes_per_second) + cached_seconds


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
    """Returns the errors of the TTFT predictions; empty without any."""
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
