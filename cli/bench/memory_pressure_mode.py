"""Runs one mode of `bench pressure`: its engine, its sessions and the times of their turns."""

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
from turbomind.config.facts import PAGE_TOKENS
from turbomind.errors import InternalError

from .measure import GREEDY
from .workload import Arrival

MODES = {
    "tiers": "sessions stay open; pages evicted from the device are loaded from lower tiers",
    "none": "sessions stay open; pages evicted from the device are computed again",
    "lru": "automatic prefix cache: no page is held between turns, all have the same retention "
    "priority, and the least recently used one is evicted first; no lower tiers",
}
TIERS = ("host", "disk")
USERS = 4  # concurrent turns of the warm-up
MARGIN = 1.25  # size of the lower tiers / pages at the start, since sessions grow
FLUSH = 300.0  # seconds until all pages are written


@dataclass(frozen=True)
class Setup:
    """Parameters of all modes.

    `lengths` are the initial contexts of the sessions in tokens, `pages` is their total size, and
    `seconds` is the time limit of a mode.
    """

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
class BenchSession:
    """A session: its tokens, the number of initial ones, and its handle between two turns."""

    tokens: list[int]
    first: int
    handle: Handle | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class TurnResult:
    """Result of one turn.

    Attributes:
        seconds: TTFT from the arrival of the turn; a lower bound if `unfinished`.
        unfinished: The mode ended before the first token.
        new: Tokens of the message.
        prompt: Tokens of the prompt.
        reused: Tokens of the prompt whose KV was reused.
        loaded: Reused tokens that were loaded from lower tiers.
    """

    seconds: float = 0.0
    unfinished: bool = True
    new: int = 0
    prompt: int = 0
    reused: int = 0
    loaded: int = 0

    @property
    def past(self) -> int:
        """Tokens computed by earlier turns; the last token of a reply is computed later."""
        return max(self.prompt - self.new - 1, 0)

    @property
    def again(self) -> int:
        """Tokens of earlier turns that were computed again."""
        return max(self.past - self.reused, 0)


class ModeRun:
    """Opens the engine, prefills the sessions and warms up; then measures."""

    def __init__(self, mode: str, setup: Setup) -> None:
        self._mode, self._setup = mode, setup
        self._engine = Engine(setup.path, **{**setup.options, **self._tiers()})
        self._began = time.perf_counter()
        self._sessions = [
            BenchSession(self._ids(length - 1, index), length)
            for index, length in enumerate(setup.lengths)
        ]
        self.capacity = 0.0
        """Turns per second of the warm-up, with USERS concurrent turns."""

    def __enter__(self) -> ModeRun:
        return self

    def __exit__(self, *error: object) -> None:
        for session in self._sessions:
            if session.handle is not None:
                session.handle.close()  # closing the engine would save them
        self._engine.close()

    def prepare(self) -> None:
        """Prefills the initial contexts, then runs the warm-up at full speed."""
        asyncio.run(self._fill())
        if self._mode == "tiers" and not self._engine.flush_pages(FLUSH).ended:
            raise InternalError(f"pages were not written within {FLUSH:.0f} seconds")
        begin = time.perf_counter()
        asyncio.run(self._closed_loop(self._setup.warm_up))
        self.capacity = len(self._setup.warm_up) / (time.perf_counter() - begin)

    def measure(self, arrivals: list[Arrival], window: float) -> dict[str, Any]:
        """Runs turns as they arrive.

        Args:
            arrivals: The turns.
            window: Seconds in which they arrive; the last turns get the rest of the mode's time.

        Returns:
            The figures of the mode.
        """
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
        """Prefills all sessions; without tiers, only those that can stay on the device."""
        sessions, pages = self._sessions, 0
        if self._mode != "tiers":
            sessions = []
            for session in reversed(self._sessions):
                sessions.insert(0, session)
                pages += -(-session.first // PAGE_TOKENS)
                if pages > 1.5 * self._setup.cache_pages:
                    break
        for session in sessions:
            await self._turn(session, [], 1, TurnResult(), 0.0)

    async def _closed_loop(self, arrivals: list[Arrival]) -> None:
        self._new_locks()
        left = iter(arrivals)

        async def user() -> None:
            for arrival in left:
                await self._arrive(arrival, TurnResult(), 0.0)

        await asyncio.gather(*(user() for _ in range(USERS)))

    async def _open_loop(
        self, arrivals: list[Arrival], begin: float, seconds: float
    ) -> list[TurnResult]:
        self._new_locks()
        asked = [TurnResult(new=arrival.new) for arrival in arrivals]

        async def come(arrival: Arrival, one: TurnResult) -> None:
            await asyncio.sleep(begin + arrival.at - time.perf_counter())
            await self._arrive(arrival, one, begin + arrival.at)

        turns = [asyncio.ensure_future(come(*pair)) for pair in zip(arrivals, asked, strict=True)]
        done, late = await asyncio.wait(turns, timeout=begin + seconds - time.perf_counter())
        now = time.perf_counter()
        for turn in late:
            turn.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for turn in done:
            turn.result()  # raises the error of the turn
        for arrival, one in zip(arrivals, asked, strict=True):
            if one.unfinished:
                one.seconds = now - begin - arrival.at
        return asked

    async def _arrive(self, arrival: Arrival, asked: TurnResult, due: float) -> None:
        session = self._sessions[arrival.session]
        async with session.lock:  # a session has one turn at a time
            new = self._ids(arrival.new, arrival.session, round(arrival.at * 1e6))
            await self._turn(session, new, arrival.reply, asked, due)

    async def _turn(
        self, session: BenchSession, new: list[int], reply: int, asked: TurnResult, due: float
    ) -> None:
        if len(session.tokens) + len(new) + reply > self._engine.max_context:
            session.tokens = session.tokens[: session.first]  # an overlong session starts again
        asked.new = len(new)
        replied: list[int] = []
        async for event in self._ask(session, new, reply):
            if event.token_ids and asked.unfinished:
                asked.seconds, asked.unfinished = event.seconds - due, False
            replied += event.token_ids
            if event.error is not None:
                raise event.error
            if event.finish_reason is not None:
                asked.prompt, asked.reused = event.prompt_tokens, event.reused_tokens
                asked.loaded = event.loaded_tokens
        session.tokens += new + replied
        self._end(session)

    def _ask(self, session: BenchSession, new: list[int], reply: int) -> Stream:
        """Submits the next turn; an open handle gets the new tokens, a new handle all of them."""
        prefix_length = len(session.tokens)
        if session.handle is None:
            prefix_length = 0
            value = 0.0 if self._mode == "lru" else RETENTION_SESSION
            persist = self._mode == "tiers"
            session.handle = self._engine.open("", value, persist=persist)
        appended = [*session.tokens[prefix_length:], *new]
        return session.handle.advance(prefix_length, appended, max_new_tokens=reply, **GREEDY)

    def _end(self, session: BenchSession) -> None:
        assert session.handle is not None
        if self._mode == "tiers":
            session.handle.save()
        elif self._mode == "lru":
            session.handle.close()
            session.handle = None

    # --- helpers ---------------------------------------------------------------------------------

    def _new_locks(self) -> None:
        """Replaces the locks, since an asyncio lock belongs to one event loop."""
        for session in self._sessions:
            session.lock = asyncio.Lock()

    def _ids(self, count: int, *which: int) -> list[int]:
        """Returns random token ids, the same ones in each mode."""
        random = np.random.default_rng([self._setup.seed, *which])
        ids: list[int] = random.integers(0, self._engine.vocab_size, count).tolist()
        return ids

    def _reads(self) -> dict[str, int]:
        """Returns the number of pages loaded so far, by tier."""
        return {name: tier.reads for name, tier in self._engine.stats().tiers.items()}

    def _tiers(self) -> dict[str, Any]:
        """Returns the engine options of the tiers.

        The last tier holds all sessions; host memory in front of a disk is as large as the device.
        """
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


def summary(asked: list[TurnResult], reads: Mapping[str, int]) -> dict[str, Any]:
    """Returns the figures of a mode.

    Args:
        asked: The turns.
        reads: Loaded pages by tier, which distribute the loaded tokens among the tiers.
    """
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
    """Returns mean, percentiles (nearest rank) and maximum."""
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered),
        **{f"p{share}": percentile(ordered, share) for share in (50, 90, 99)},
        "max": ordered[-1],
    }


def percentile(ordered: list[float], share: int) -> float:
    """Returns the nearest-rank percentile of sorted values."""
    return ordered[max(math.ceil(len(ordered) * share / 100) - 1, 0)]
