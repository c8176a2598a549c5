"""More sessions than memory: the time to the first token with tiers below the device, and without.

The same sessions and the same arrivals in each mode, open loop: a turn comes at its time whether or
not those before it are done, and its time to the first token counts from then.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from turbomind import Engine
from turbomind.errors import InvalidRequest
from turbomind.loading.loader import ModelInfo

from .. import facts
from ..options import described
from . import workload
from .disk import disk_facts, scratch
from .measure import GREEDY, first_token
from .memory_pressure_mode import MODES, TIERS, ModeRun, Setup
from .workload import Arrival, Limits, Row

MOST_SESSIONS, LEAST_SESSIONS = 64, 8
FILL, WINDOW = 0.3, 0.5  # of --seconds: for the pasts, for arrivals; the rest is for the last turns
PROBE_TOKENS = 512  # of the prompt that the prefill speed is measured with
LONG_PASTS = 0.6  # of that speed, for prompts that are longer
ROWS = 20_000  # that are generated where there is no trace
WARM_UP_TURNS = 24
SPARE_PAGES = 2  # of the device, beside those of the longest session


@dataclass(frozen=True)
class Plan:
    """What `bench pressure` measures. `seconds` of a mode; `rate` of arrivals per second, None:
    `load` of what the tiered mode can do; `sessions` None: as many as can be filled in time."""

    modes: tuple[str, ...]
    tiers: tuple[str, ...]
    oversubscribe: float
    seconds: float
    sessions: int | None
    rate: float | None
    load: float
    history: int
    reply: int
    trace: str | None
    seed: int
    folder: str | None

    def check(self) -> None:
        """Raises InvalidRequest when the values do not go together."""
        for name, chosen, known in (("modes", self.modes, MODES), ("tiers", self.tiers, TIERS)):
            unknown = [each for each in chosen if each not in known]
            if unknown or not chosen or len(set(chosen)) != len(chosen):
                raise InvalidRequest(
                    f"--{name} is {','.join(chosen)!r}, expected some of {', '.join(known)}"
                )
        if self.rate is None and "tiers" not in self.modes:
            raise InvalidRequest("--rate is not given, expected one where tiers is not in --modes")


def run(source: str | os.PathLike[str], plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Everything as one JSON-able report. Times in seconds."""
    plan.check()
    info = described(source, options, weights=options.get("load_format") != "dummy")
    with scratch(plan.folder) as folder:
        bench = _Bench(info, plan, options, folder)
        report = bench.report()
        return {**report, **disk_facts(folder)}


class _Bench:
    """The sessions and arrivals that all modes have in common, and a run of each mode."""

    def __init__(self, info: ModelInfo, plan: Plan, options: dict[str, Any], folder: Path) -> None:
        self._info, self._plan, self._options, self._folder = info, plan, options, folder
        self._limits = Limits(min(plan.history, info.description.max_context // 2), plan.reply)
        self._rows = self._read_rows()
        self._prefill = self._prefill_speed()
        self._lengths = self._choose_lengths()
        self._pages = sum(map(_pages, self._lengths))

    def report(self) -> dict[str, Any]:
        plan, model = self._plan, self._info.description
        rate, modes = plan.rate, {}
        for name in sorted(plan.modes, key=list(MODES).index):  # tiers first: it gives the rate
            with ModeRun(name, self._setup()) as mode:
                mode.prepare()
                if rate is None:
                    rate = plan.load * mode.capacity
                modes[name] = mode.measure(self._arrivals(rate), self._window)
        return {
            "model": str(self._info.path),
            "architecture": model.architecture,
            "dtype": self._info.dtype,
            "kv_dtype": self._info.kv_dtype,
            "plan": asdict(plan),
            "source": plan.trace or "generated",
            "sessions": len(self._lengths),
            "history_tokens": sum(self._lengths),
            "longest_history": max(self._lengths),
            "device_tokens": self._cache_pages * facts.PAGE_TOKENS,
            "oversubscribed": self._pages / self._cache_pages,
            "kv_bytes": self._pages * facts.page_bytes(model, self._info.kv_dtype),
            "prefill_tokens_per_second": self._prefill,
            "rate": rate,
            "window_seconds": self._window,
            "modes": modes,
            "against": compare(modes),
        }

    def _setup(self) -> Setup:
        return Setup(
            path=self._info.path,
            options={**self._options, "cache_pages": self._cache_pages},
            tiers=self._plan.tiers,
            page_bytes=facts.page_bytes(self._info.description, self._info.kv_dtype),
            pages=self._pages,
            cache_pages=self._cache_pages,
            folder=self._folder,
            lengths=self._lengths,
            warm_up=self._warm_up(),
            seconds=self._plan.seconds,
            seed=self._plan.seed,
        )

    @property
    def _window(self) -> float:
        """Seconds in which turns arrive."""
        return self._plan.seconds * WINDOW

    @property
    def _cache_pages(self) -> int:
        """Of the device; at least what the longest session needs to run."""
        return max(self._share(self._lengths), self._needed(self._lengths))

    def _share(self, lengths: list[int]) -> int:
        """Pages of the device, as --oversubscribe says."""
        return round(sum(map(_pages, lengths)) / self._plan.oversubscribe)

    def _needed(self, lengths: list[int]) -> int:
        """Pages that the longest session needs to run."""
        longest = max(lengths) + workload.LONGEST_MESSAGE + self._plan.reply
        return _pages(longest) + SPARE_PAGES

    def _arrivals(self, rate: float) -> list[Arrival]:
        rows = self._rows[len(self._lengths) :]
        count = max(round(self._window * rate), 2)
        sessions, seed = len(self._lengths), self._plan.seed
        return workload.arrivals(rows, count, self._window, sessions, self._limits, seed)

    def _warm_up(self) -> list[Arrival]:
        """Turns before them, one by one."""
        rows, sessions = self._rows[-WARM_UP_TURNS:], len(self._lengths)
        return workload.arrivals(rows, len(rows), 0.0, sessions, self._limits, self._plan.seed + 1)

    def _read_rows(self) -> list[Row]:
        if self._plan.trace is None:
            return workload.generated_rows(ROWS, self._plan.seed)
        rows = workload.read_trace(self._plan.trace)
        least = (self._plan.sessions or MOST_SESSIONS) + 2
        if len(rows) < least:
            raise InvalidRequest(
                f"--trace has {len(rows)} rows, expected {least} or more: one begins each session"
            )
        return rows

    def _prefill_speed(self) -> float:
        """Tokens per second of a prompt of PROBE_TOKENS."""
        tokens = min(PROBE_TOKENS, self._info.description.max_context // 2)
        random = np.random.default_rng(self._plan.seed)
        with Engine(
            self._info.path, **{**self._options, "cache_pages": 2 * _pages(tokens)}
        ) as core:
            for _ in range(2):  # the first one warms up
                prompt = random.integers(0, core.vocab_size, tokens).tolist()
                core.evict()
                seconds, _ = first_token(partial(core.stream, prompt, max_new_tokens=1, **GREEDY))
        return tokens / seconds

    def _choose_lengths(self) -> list[int]:
        """As the rows say, cut where the longest would need a larger device than it should be."""
        for longest in range(self._limits.history, workload.SHORTEST, -facts.PAGE_TOKENS):
            found = self._lengths_up_to(longest)
            if self._needed(found) <= self._share(found):
                return found
        return self._lengths_up_to(self._limits.history)  # so few that no cut helps

    def _lengths_up_to(self, longest: int) -> list[int]:
        plan, limits = self._plan, Limits(longest, self._plan.reply)
        if plan.sessions is not None:
            return workload.histories(self._rows, plan.sessions, 1 << 62, limits)
        budget = int(self._prefill * LONG_PASTS * plan.seconds * FILL)
        found = workload.histories(self._rows, MOST_SESSIONS, budget, limits)
        if len(found) < LEAST_SESSIONS:
            raise InvalidRequest(
                f"--seconds is {plan.seconds:g}, too short to fill {LEAST_SESSIONS} sessions at "
                f"{self._prefill:.0f} tokens per second: raise it, or lower --history"
            )
        return found


def _pages(tokens: int) -> int:
    return -(-tokens // facts.PAGE_TOKENS)


def compare(modes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much lower the tiered mode's times are, as shares of the other mode's."""
    if "tiers" not in modes:
        return {}
    tiers, found = modes["tiers"]["ttft"], {}
    for name, mode in modes.items():
        if name != "tiers":
            for figure in ("mean", "p90"):
                found[f"{figure}_below_{name}"] = 1 - tiers[figure] / mode["ttft"][figure]
    return found
