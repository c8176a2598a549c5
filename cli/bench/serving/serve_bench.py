"""Runs `lmchat bench serve`: prepares the server, runs the load at each rate, collects figures."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lmchat.errors import Error

from ..workload import Row, read_trace
from . import schedule
from .endpoint import Endpoint
from .figures import Limits, capacity, figures
from .lengths import (
    REPLY,
    FromQuestions,
    FromTrace,
    Generated,
    Lengths,
    counted_by,
    read_questions,
)
from .load import Load, Observed, Window
from .null_server import SHORTEST_GAP, NullLoad, client_overhead
from .plan import Plan
from .texts import Writer, lengths_of, make_writer

FORMAT = 1
"""Version of the report's JSON."""

SESSION_PREFIX = "bench-serve"
LENGTH_SAMPLES = 1000
_FILES = ("trace", "questions", "tokenizer")  # fields of a plan that are paths
Progress = Callable[[str], None]
"""Receives a line about what happens."""


def run(plan: Plan, api_key: str | None, progress: Progress) -> dict[str, Any]:
    """Measures a server and returns a JSON-able report; times in seconds.

    Ctrl-C ends the measurement; the report then has what was measured until then, and
    `interrupted` is true.

    Args:
        plan: The load.
        api_key: Bearer token, or None.
        progress: Receives a line per rate.

    Raises:
        InvalidRequest: An option is wrong, or the server refuses the requests.
        Error: The server does not answer.
    """
    plan.check()
    rows = None if plan.trace is None else read_trace(plan.trace)
    questions = None if plan.questions is None else read_questions(plan.questions)
    known = None
    if plan.tokenizer is not None and questions is not None:
        known = counted_by(plan.tokenizer, questions)
    return asyncio.run(_Bench(plan, api_key, progress, rows, questions, known).report())


class _Bench:
    """A sweep of rates on one server."""

    def __init__(
        self,
        plan: Plan,
        api_key: str | None,
        progress: Progress,
        rows: list[Row] | None,
        questions: list[str] | None,
        known: list[int] | None,
    ) -> None:
        self.plan = plan
        self.progress = progress
        self.rows = rows
        self.questions = questions
        self.known = known
        """Tokens of each question; None: the server counts them."""
        self.endpoint = Endpoint(
            plan.url, api_key, plan.endpoint, plan.model, plan.temperature, plan.timeout
        )
        self.text_seed = secrets.randbits(32) if plan.text_seed is None else plan.text_seed
        self.session = f"{SESSION_PREFIX}-{secrets.token_hex(4)}" if plan.sessions else None

    async def report(self) -> dict[str, Any]:
        try:
            await self.endpoint.prepare()
            return await self._sweep()
        finally:
            await self.endpoint.http.close()

    async def _sweep(self) -> dict[str, Any]:
        stop = asyncio.Event()
        writer = await make_writer(self.endpoint)
        lengths = await self._lengths()
        message, reply = _mean_lengths(lengths, self.plan)
        rates: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, stop)
        try:
            for rate in self.plan.rates:
                rates.append(await self._rate(rate, writer, lengths, reply, stop))
                if stop.is_set():
                    break
            overhead = await self._overhead(rates, writer, message, stop)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            deleted = await self._delete_sessions()
        return {
            "format": FORMAT,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "url": self.plan.url,
            "model": self.endpoint.model,
            "server": self.endpoint.server,
            "plan": _described(self.plan) | {"text_seed": self.text_seed},
            "lengths": {"source": lengths.source, "message_tokens": message, "reply_tokens": reply},
            "tokens_per_word": writer.tokens_per_word,
            "token_source": writer.source,
            "reports": self.endpoint.reports,
            "fields": self.endpoint.fields,
            "warmup_seconds": self.plan.warmup_seconds(reply),
            "rates": rates,
            "capacity": capacity(rates),
            "overhead": overhead,
            "sessions_deleted": deleted,
            "interrupted": stop.is_set(),
        }

    def _interrupt(self, stop: asyncio.Event) -> None:
        """Ends the run at the first Ctrl-C; another one ends the process as usual."""
        stop.set()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        self.progress("interrupted: the results so far follow")

    async def _lengths(self) -> Lengths:
        plan = self.plan
        if self.rows is not None:
            return FromTrace(_name(plan.trace), self.rows, plan.reply_tokens)
        if self.questions is not None:
            found = self.known or await lengths_of(self.endpoint, self.questions)
            return FromQuestions(_name(plan.questions), found, plan.reply_tokens or REPLY)
        return Generated(plan.message_tokens, plan.reply_tokens or REPLY)

    async def _rate(
        self, rate: float, writer: Writer, lengths: Lengths, reply: float, stop: asyncio.Event
    ) -> dict[str, Any]:
        plan = self.plan
        warmup = plan.warmup_seconds(reply)
        conversations = schedule.schedule(
            plan,
            rate,
            warmup + plan.duration,
            self._arrivals(rate / plan.turns, warmup + plan.duration),
            lengths,
            writer,
            str(self.text_seed),
        )
        self.progress(
            f"{rate:g} turns/s: {warmup:.0f} s of warm-up and {plan.duration:g} s measured"
        )
        session = None if self.session is None else f"{self.session}-{rate:g}"
        window = Window(warmup, plan.duration, plan.requests)
        observed: Observed = await Load(self.endpoint.send, conversations, window, session).run(
            stop
        )
        return figures(rate, observed, Limits(plan.ttft_limit, plan.tpot_limit))

    def _arrivals(self, rate: float, seconds: float) -> Iterable[float]:
        if self.plan.arrivals == "trace":
            assert self.rows is not None
            return schedule.from_trace(self.rows, rate, seconds)
        return schedule.poisson(rate, self.plan.seed)

    async def _overhead(
        self, rates: list[dict[str, Any]], writer: Writer, message: float, stop: asyncio.Event
    ) -> dict[str, Any] | None:
        """Measures the client with the streams and the events of the busiest rate."""
        busy = [each for each in rates if each["event_gap"] is not None]
        if not busy or not self.plan.null_seconds or stop.is_set():
            return None
        busiest = max(busy, key=lambda each: float(each["output_tokens_per_second"]))
        streams = max(1, round(busiest["streams"]["mean"]))
        text = writer.text(max(1, round(message)), random.Random(0))
        self.progress(f"the client alone: {self.plan.null_seconds:g} s")
        load = NullLoad(streams, max(busiest["event_gap"], SHORTEST_GAP))
        return await client_overhead(load, self.plan.null_seconds, text, stop)

    async def _delete_sessions(self) -> int | None:
        """Deletes the sessions of this run; None where there are none or the server cannot."""
        if self.session is None:
            return None
        try:
            return await self.endpoint.delete_sessions(self.session)
        except Error as error:
            self.progress(f"the sessions of this run were not deleted: {error}")
            return None


def _mean_lengths(lengths: Lengths, plan: Plan) -> tuple[float, float]:
    """Returns the mean tokens of messages and replies, over LENGTH_SAMPLES draws."""
    dice = random.Random(plan.seed)
    drawn = [lengths.draw(index, dice) for index in range(LENGTH_SAMPLES)]
    messages = [min(message, plan.longest_message or message) for message, _ in drawn]
    replies = [min(reply, plan.longest_reply or reply) for _, reply in drawn]
    return sum(messages) / len(drawn), sum(replies) / len(drawn)


def _described(plan: Plan) -> dict[str, Any]:
    """Returns the plan for the report, with names of files: their folders are this machine's."""
    found = dataclasses.asdict(plan)
    return found | {file: _name(found[file]) for file in _FILES if found[file] is not None}


def _name(path: object) -> str:
    return Path(str(path)).name
