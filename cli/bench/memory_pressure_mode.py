"""One mode of `bench pressure`: its engine, the sessions on it, and what their turns took."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmchat.kv.handle_cache import RETENTION_SESSION
from turbomind import Engine, Handle, Stream
from turbomind.errors import InternalError

from ..facts import PAGE_TOKENS
from .measure import GREEDY
from .workload import Arrival

MODES = {
    "tiers": "sessions stay open; pages evicted from the device are loaded from lower tiers",
    "none": "sessions stay open; pages evicted from the device are computed again",
    "lru": "automatic prefix cache: no page is held between turns, all have the same retention "
    "priority, and the least recently used one is evicted first; no lower tiers",
}
TIERS = ("host", "disk")
USERS = 4  # of the warm-up, each with a turn at a time
MARGIN = 1.25  # of the lower tiers, over the pages at the start: sessions grow
FLUSH = 300.0  # seconds for the background to write all sessions


@dataclass(frozen=True)
class Setup:
    """What all modes have in common. `lengths` are the sessions' pasts in tokens, `pages` theirs in
    all, `seconds` what a mode may take."""

    path: Path
    options: dict[str, Any]
    tiers: tuple[str, ...]
    page_bytes: int
    pages: int
    cache_pages: int
    folder: Path
    lengths: list[int]
    warm_up: list[Arrival]
    seconds: float
    seed: int


@dataclass
class Talker:
    """A session: its tokens, of which it began with `first`, and the handle between two turns."""

    tokens: list[int]
    first: int
    handle: Handle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Asked:
    """One turn: seconds from its arrival to its first token (`unfinished`: at least so many), and
    tokens: `new`, the whole `prompt`, those of it not computed, those of them from lower tiers."""

    seconds: float = 0.0
    unfinished: bool = True
    new: int = 0
    prompt: int = 0
    reused: int = 0
    loaded: int = 0

    @property
    def past(self) -> int:
        """Tokens that were computed before. The last one of a reply is computed after it."""
        return max(self.prompt - self.new - 1, 0)

    @property
    def again(self) -> int:
        """Tokens of the past that were computed again."""
        return max(self.past - self.reused, 0)


class ModeRun:
    """Opens the engine, fills the sessions and warms up; then measures."""

    def __init__(self, mode: str, setup: Setup) -> None:
        self._mode, self._setup = mode, setup
        self._engine = Engine(setup.path, **{**setup.options, **self._tiers()})
        self._began = time.perf_counter()
        self._talkers = [
            Talker(self._ids(length - 1, index), length)
            for index, length in enumerate(setup.lengths)
        ]
        self.capacity = 0.0
        """Turns per second, USERS at a time."""

    def __enter__(self) -> ModeRun:
        return self

    def __exit__(self, *error: object) -> None:
        for talker in self._talkers:
            if talker.handle is not None:
                talker.handle.close()  # an engine that closes would save them
        self._engine.close()

    def prepare(self) -> None:
        """Computes the pasts, then takes the warm-up's turns as fast as they go."""
        asyncio.run(self._fill())
        if self._mode == "tiers" and not self._engine.flush_pages(FLUSH).ended:
            raise InternalError(f"pages were not written within {FLUSH:.0f} seconds")
        begin = time.perf_counter()
        asyncio.run(self._closed_loop(self._setup.warm_up))
        self.capacity = len(self._setup.warm_up) / (time.perf_counter() - begin)

    def measure(self, arrivals: list[Arrival], window: float) -> dict[str, Any]:
        """The turns as they arrive, in `window` seconds; the last ones get what is left of the
        mode's time."""
        before = self._reads()
        begin = time.perf_counter()
        left = self._setup.seconds - (begin - self._began)
        asked = asyncio.run(self._open_loop(arrivals, begin, max(left, 1.1 * window)))
        reads = {name: count - before[name] for name, count in self._reads().items()}
        return {
            "what": MODES[self._mode],
            "warm_up_turns_per_second": self.capacity,
            "prepare_seconds": begin - self._began,
            "seconds": time.perf_counter() - self._began,
            **summary(asked, reads),
            "samples": [dataclasses.asdict(each) for each in asked],
        }

    # --- turns -----------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """All pasts; without tiers those alone that can still be on the device afterwards."""
        talkers, pages = self._talkers, 0
        if self._mode != "tiers":
            talkers = []
            for talker in reversed(self._talkers):
                talkers.insert(0, talker)
                pages += -(-talker.first // PAGE_TOKENS)
                if pages > 1.5 * self._setup.cache_pages:
                    break
        for talker in talkers:
            await self._turn(talker, [], 1, Asked(), 0.0)

    async def _closed_loop(self, arrivals: list[Arrival]) -> None:
        self._new_locks()
        left = iter(arrivals)

        async def user() -> None:
            for arrival in left:
                await self._arrive(arrival, Asked(), 0.0)

        await asyncio.gather(*(user() for _ in range(USERS)))

    async def _open_loop(
        self, arrivals: list[Arrival], begin: float, seconds: float
    ) -> list[Asked]:
        self._new_locks()
        asked = [Asked(new=arrival.new) for arrival in arrivals]

        async def come(arrival: Arrival, one: Asked) -> None:
            await asyncio.sleep(begin + arrival.at - time.perf_counter())
            await self._arrive(arrival, one, begin + arrival.at)

        turns = [asyncio.ensure_future(come(*pair)) for pair in zip(arrivals, asked, strict=True)]
        done, late = await asyncio.wait(turns, timeout=begin + seconds - time.perf_counter())
        now = time.perf_counter()
        for turn in late:
            turn.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for turn in done:
            turn.result()  # raises what went wrong
        for arrival, one in zip(arrivals, asked, strict=True):
            if one.unfinished:
                one.seconds = now - begin - arrival.at
        return asked

    async def _arrive(self, arrival: Arrival, asked: Asked, due: float) -> None:
        talker = self._talkers[arrival.session]
        async with talker.lock:  # who has not got the answer yet does not ask again
            new = self._ids(arrival.new, arrival.session, round(arrival.at * 1e6))
            await self._turn(talker, new, arrival.reply, asked, due)

    async def _turn(
        self, talker: Talker, new: list[int], reply: int, asked: Asked, due: float
    ) -> None:
        if len(talker.tokens) + len(new) + reply > self._engine.max_context:
            talker.tokens = talker.tokens[: talker.first]  # an overlong session begins again
        asked.new = len(new)
        replied: list[int] = []
        async for event in self._ask(talker, new, reply):
            if event.token_ids and asked.unfinished:
                asked.seconds, asked.unfinished = event.seconds - due, False
            replied += event.token_ids
            if event.error is not None:
                raise event.error
            if event.finish_reason is not None:
                asked.prompt, asked.reused = event.prompt_tokens, event.reused_tokens
                asked.loaded = event.loaded_tokens
        talker.tokens += new + replied
        self._end(talker)

    def _ask(self, talker: Talker, new: list[int], reply: int) -> Stream:
        """The next turn; a handle that stays gets its new tokens, another one all of them."""
        keep = len(talker.tokens)
        if talker.handle is None:
            keep = 0
            value = 0.0 if self._mode == "lru" else RETENTION_SESSION
            persist = self._mode == "tiers"
            talker.handle = self._engine.open("", value, persist=persist)
        appended = [*talker.tokens[keep:], *new]
        return talker.handle.advance(keep, appended, max_new_tokens=reply, **GREEDY)

    def _end(self, talker: Talker) -> None:
        assert talker.handle is not None
        if self._mode == "tiers":
            talker.handle.save()
        elif self._mode == "lru":
            talker.handle.close()
            talker.handle = None

    # --- what it needs ---------------------------------------------------------------------------

    def _new_locks(self) -> None:
        """A lock belongs to the loop that it was first waited for in."""
        for talker in self._talkers:
            talker.lock = asyncio.Lock()

    def _ids(self, count: int, *which: int) -> list[int]:
        """Random tokens, the same ones in each mode."""
        random = np.random.default_rng([self._setup.seed, *which])
        ids: list[int] = random.integers(0, self._engine.vocab_size, count).tolist()
        return ids

    def _reads(self) -> dict[str, int]:
        """Pages that came up so far, by tier."""
        return {name: tier.reads for name, tier in self._engine.stats().tiers.items()}

    def _tiers(self) -> dict[str, Any]:
        """Engine options. The last tier has room for all; host memory above a disk has as much as
        the device."""
        setup = self._setup
        if self._mode != "tiers":
            return {}
        found: dict[str, Any] = {}
        if "host" in setup.tiers:
            pages = setup.cache_pages if "disk" in setup.tiers else round(MARGIN * setup.pages)
            found["host_memory"] = pages * setup.page_bytes
        if "disk" in setup.tiers:
            found["page_folder"] = str(setup.folder / "pages")
        return found


def summary(asked: list[Asked], reads: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a mode. `reads` are the pages that came up, by tier; they tell how the loaded
    tokens are shared among tiers."""
    past, loaded = sum(a.past for a in asked), sum(a.loaded for a in asked)
    pages = sum(reads.values())
    device = sum(min(a.reused, a.past) for a in asked) - loaded
    return {
        "turns": len(asked),
        "unfinished": sum(a.unfinished for a in asked),
        "ttft": figures([a.seconds for a in asked]),
        "new_tokens": sum(a.new for a in asked),
        "past_tokens": past,
        "again_tokens": sum(a.again for a in asked),
        "loaded_tokens": loaded,
        "hit_rates": {
            "device": device / max(past, 1),
            **{name: loaded * n / max(pages, 1) / max(past, 1) for name, n in reads.items()},
        },
    }


def figures(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles (of the measured values, none in between) and the longest."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered),
        **{f"p{share}": percentile(ordered, share) for share in (50, 90, 99)},
        "max": ordered[-1],
    }


def percentile(ordered: list[float], share: int) -> float:
    """The least value that `share` percent of all are at most."""
    return ordered[max(math.ceil(len(ordered) * share / 100) - 1, 0)]
