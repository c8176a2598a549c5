"""Measures the TTFT with more sessions than fit in memory, with and without lower tiers.

All modes have the same sessions and arrivals, in an open loop: a turn arrives at its time whether
or not earlier turns are done, and its TTFT counts from its arrival.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import turbomind
from turbomind import Engine
from turbomind.config import facts
from turbomind.errors import InvalidRequest
from turbomind.loading.loader import ModelInfo

from . import workload
from .disk import disk_facts, scratch
from .measure import GREEDY, first_token
from .memory_pressure_mode import MODES, TIERS, ModeRun, Setup
from .workload import Arrival, Limits, Row

MOST_SESSIONS, LEAST_SESSIONS = 64, 8
FILL, WINDOW = 0.3, 0.5  # fractions of --seconds for prefill and arrivals; the rest: last turns
PROBE_TOKENS = 512  # prompt of the prefill speed measurement
LONG_CONTEXTS = 0.6  # fraction of that speed for longer prompts
ROWS = 20_000  # generated rows without a trace
WARM_UP_TURNS = 24
RESERVE_PAGES = 2  # device pages in addition to those of the longest session


@dataclass(frozen=True)
class Plan:
    """Parameters of `bench pressure`; the options of the command explain them.

    `rate` None: `load` times the warm-up rate of the tiered mode. `sessions` None: as many as can
    be prefilled in time.
    """

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
        """Raises InvalidRequest if the values contradict each other."""
        for name, chosen, known in (("modes", self.modes, MODES), ("tiers", self.tiers, TIERS)):
            unknown = [each for each in chosen if each not in known]
            if unknown or not chosen or len(set(chosen)) != len(chosen):
                raise InvalidRequest(
                    f"--{name} is {','.join(chosen)!r}, expected some of {', '.join(known)}"
                )
        if self.rate is None and "tiers" not in self.modes:
            raise InvalidRequest("--rate is not given, expected one where tiers is not in --modes")


def run(source: str | os.PathLike[str], plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Runs all modes and returns a JSON-able report; times in seconds."""
    plan.check()
    info = turbomind.plan(source, **options).model
    with scratch(plan.folder) as folder:
        bench = _Bench(info, plan, options, folder)
        report = bench.report()
        return {**report, **disk_facts(folder)}


class _Bench:
    """The sessions and arrivals of all modes, and a run of each mode."""

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
        for name in sorted(
            plan.modes, key=list(MODES).index
        ):  # tiers first: its warm-up sets the rate
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
        """Pages of the device; at least those that the longest session needs."""
        return max(self._share(self._lengths), self._needed(self._lengths))

    def _share(self, lengths: list[int]) -> int:
        """Returns the pages of the device that give the ratio --oversubscribe."""
        return round(sum(map(_pages, lengths)) / self._plan.oversubscribe)

    def _needed(self, lengths: list[int]) -> int:
        """Pages that the longest session needs to run."""
        longest = max(lengths) + workload.LONGEST_MESSAGE + self._plan.reply
        return _pages(longest) + RESERVE_PAGES

    def _arrivals(self, rate: float) -> list[Arrival]:
        rows = self._rows[len(self._lengths) :]
        count = max(round(self._window * rate), 2)
        sessions, seed = len(self._lengths), self._plan.seed
        return workload.arrivals(rows, count, self._window, sessions, self._limits, seed)

    def _warm_up(self) -> list[Arrival]:
        """Returns the turns of the warm-up."""
        rows, sessions = self._rows[-WARM_UP_TURNS:], len(self._lengths)
        return workload.arrivals(rows, len(rows), 0.0, sessions, self._limits, self._plan.seed + 1)

    def _read_rows(self) -> list[Row]:
        if self._plan.trace is None:
            return workload.generated_rows(ROWS, self._plan.seed)
        rows = workload.read_trace(self._plan.trace)
        least = (self._plan.sessions or MOST_SESSIONS) + 2
        if len(rows) < least:
            raise InvalidRequest(
                f"--trace has {len(rows)} rows, expected {least} or more, one for each session"
            )
        return rows

    def _prefill_speed(self) -> float:
        """Returns the prefill speed of PROBE_TOKENS, in tokens per second."""
        tokens = min(PROBE_TOKENS, self._info.description.max_context // 2)
        random = np.random.default_rng(self._plan.seed)
        with Engine(
            self._info.path, **{**self._options, "cache_pages": 2 * _pages(tokens)}
        ) as core:
            for _ in range(2):  # the first one is a warm-up
                prompt = random.integers(0, core.vocab_size, tokens).tolist()
                core.evict()
                seconds, _ = first_token(partial(core.stream, prompt, max_new_tokens=1, **GREEDY))
        return tokens / seconds

    def _choose_lengths(self) -> list[int]:
        """Returns the initial contexts, cut so that the longest fits on the device."""
        for longest in range(self._limits.history, workload.SHORTEST, -facts.PAGE_TOKENS):
            found = self._lengths_up_to(longest)
            if self._needed(found) <= self._share(found):
                return found
        return self._lengths_up_to(self._limits.history)  # with so few sessions no cut helps

    def _lengths_up_to(self, longest: int) -> list[int]:
        plan, limits = self._plan, Limits(longest, self._plan.reply)
        if plan.sessions is not None:
            return workload.histories(self._rows, plan.sessions, 1 << 62, limits)
        budget = int(self._prefill * LONG_CONTEXTS * plan.seconds * FILL)
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
    """Returns by which fraction the tiered mode's times are lower than those of other modes."""
    if "tiers" not in modes:
        return {}
    tiers, found = modes["tiers"]["ttft"], {}
    for name, mode in modes.items():
        if name != "tiers":
            for figure in ("mean", "p90"):
                found[f"{figure}_below_{name}"] = 1 - tiers[figure] / mode["ttft"][figure]
    return found
