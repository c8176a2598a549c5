"""Metrics in Prometheus' format, with vLLM's names after the prefix `lmchat:`.

Generations report to `Metrics` when tokens arrive and when they end. Values of the engine and the
queue are read when the metrics are, on a thread of their own: the engine answers after its step.
Labels are the served model's name and words of this file, never a client's text.

Names and buckets: https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmchat.aio.engine import AsyncChatEngine
from lmchat.aio.threads import Threads
from lmchat.engine import ChatEngine
from lmchat.errors import Error, Overloaded
from lmchat.generation.generation import Reply
from lmchat.generation.state import State
from turbomind import Stats

PREFIX = "lmchat:"

# fmt: off
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# fmt: on

_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""`Reply.finish_reason` -> label of `request_success`, in vLLM's words."""

_STATUSES = (
    *(200, 201, 202, 204, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 422, 429, 431, 499),
    *(500, 501, 503),
)

Gauges = list[tuple[str, str, str, dict[str, float]]]
"""Name, what it is, name of the label or "", and values by label."""


def buckets_of_tokens(longest: int) -> tuple[float, ...]:
    """Returns vLLM's buckets 1, 2, 5, 10, 20, ... up to the longest sequence."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= longest) or (1.0,)


class Metrics:
    """The metrics of one server.

    Args:
        engine: a started engine.
        model_name: name of the model for clients.
    """

    def __init__(self, engine: AsyncChatEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._threads = Threads(1, "lmchat-metrics")
        self._threads.start_threads(1)
        self._reading: asyncio.Future[bytes] | None = None
        tokens = buckets_of_tokens(engine.max_context)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token.", _TTFT)
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between two arrivals of tokens.", _BETWEEN
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            _BETWEEN,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Time from the call to the last token.", _LATENCY
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Time until the request was sent to the engine.", _LATENCY
        )
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens.", tokens)
        self._replies = self._histogram("request_generation_tokens", "Generated tokens.", tokens)
        self._recomputed = self._histogram(
            "turn_recomputed_tokens",
            "Tokens of a session's transcript that a turn computed again.",
            (0.0, *tokens),
        )
        self._resumed = self._histogram(
            "session_resume_seconds",
            "Time to first token of turns whose KV was not in the memory of the device.",
            _TTFT,
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "Delay with which the event loop runs what is due.", _LAG
        )
        self._ended = self._counters(
            "request_success", "Finished requests.", "finished_reason", sorted(_REASONS.values())
        )
        self._responses = self._counters(
            "http_responses", "Responses by status; 499: the client disconnected before.",
            "status", [*map(str, _STATUSES), "other"],
        )  # fmt: skip
        self._taken_over = self._counter(
            "sessions_taken_over", "Turns of sessions that another process had before."
        )
        self._taken_over_loaded = self._counter(
            "taken_over_loaded_tokens", "Tokens whose KV these turns loaded from a lower tier."
        )
        self._taken_over_computed = self._counter(
            "taken_over_recomputed_tokens",
            "Tokens of the sessions that these turns computed again.",
        )
        self._registry.register(_EngineCollector(engine, model_name))

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        found = Histogram(
            PREFIX + name, about, ["model_name"], registry=self._registry, buckets=tuple(buckets)
        )
        return found.labels(self._model_name)

    def _counter(self, name: str, about: str) -> Counter:
        found = Counter(PREFIX + name, about, ["model_name"], registry=self._registry)
        return found.labels(self._model_name)

    def _counters(
        self, name: str, about: str, label: str, values: Iterable[str]
    ) -> dict[str, Counter]:
        found = Counter(PREFIX + name, about, ["model_name", label], registry=self._registry)
        return {value: found.labels(self._model_name, value) for value in values}

    # --- what happened: any thread, in constant time ----------------------------------------------

    def tokens(self, seconds: float) -> None:
        """Records that tokens of a choice arrived, so long after the ones before them."""
        self._between.observe(seconds)

    def ended(self, reply: Reply, known_tokens: int | None = None, has_moved: bool = False) -> None:
        """Records the end of a generation.

        Args:
            reply: the reply.
            known_tokens: tokens of the prompt that its session had before the turn; None: it is of
                no session.
            has_moved: whether another process had the session's lease before.
        """
        usage, timings = reply.usage, reply.timings
        if reply.token_ids:
            self._ttft.observe(timings.ttft)
            self._latency.observe(timings.total)
        if timings.tpot:
            self._tpot.observe(timings.tpot)
        self._queued.observe(timings.queued)
        self._prompts.observe(usage.prompt_tokens)
        for one in (reply, *getattr(reply, "others", ())):
            self._replies.observe(one.usage.completion_tokens)
            self._ended[_REASONS.get(one.finish_reason, "error")].inc()
        if known_tokens is not None and usage.prompt_tokens:
            # The token sampled last never had KV, so it is not computed again.
            missing = max(0, known_tokens - 1 - usage.cached_tokens)
            self._recomputed.observe(missing)
            if has_moved:
                self._taken_over.inc()
                self._taken_over_loaded.inc(usage.loaded_tokens)
                self._taken_over_computed.inc(missing)
            if reply.token_ids and (missing or usage.loaded_tokens):
                self._resumed.observe(timings.ttft)

    def failed(self, error: Error) -> None:
        """Records a generation that failed before its first token. Refused ones do not count."""
        if not isinstance(error, Overloaded):
            self._ended["error"].inc()

    def responded(self, status: int) -> None:
        """Records a response."""
        self._responses.get(str(status), self._responses["other"]).inc()

    def lagged(self, seconds: float) -> None:
        """Records the lag of the event loop."""
        self._lag.observe(seconds)

    # --- reading ----------------------------------------------------------------------------------

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format. Simultaneous callers share a reading."""
        if self._reading is None:
            self._reading = self._threads.start(self._text)
            self._reading.add_done_callback(self._was_read)
        return await asyncio.shield(self._reading)

    def _text(self) -> bytes:
        parts = []
        for family in self._registry.collect():
            parts.append(generate_latest(_Families(family)))
            time.sleep(0)  # lets the event loop run
        return b"".join(parts)

    def _was_read(self, _reading: asyncio.Future[bytes]) -> None:
        self._reading = None

    def close(self) -> None:
        """Ends the thread."""
        self._threads.close()


class _Families(CollectorRegistry):
    """A registry of one family of samples."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        """Yields the family."""
        yield self._family


class _EngineCollector(Collector):
    """Reads the engine and the queue each time the metrics are read."""

    def __init__(self, engine: AsyncChatEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering it does not read the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields gauges and counters; none of the engine once it is closed."""
        engine = self._engine.sync
        try:
            stats = engine.stats()
        except Error:
            return
        for family, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, about, label, found in values(engine, stats):
                labels = ["model_name", label] if label else ["model_name"]
                metric = family(PREFIX + name, about, labels=labels)
                for value, number in found.items():
                    metric.add_metric([self._model_name, value][: len(labels)], number)
                yield metric


def gauges(engine: ChatEngine, stats: Stats) -> Gauges:
    """Returns what is so now: requests, pages, sessions, bytes."""
    device = sum((group.total - group.free) * group.page_bytes for group in stats.groups)
    tiers = {"device": float(device), **{k: float(t.bytes) for k, t in stats.tiers.items()}}
    memory = {str(n): r.weight_bytes + r.cache_bytes for n, r in enumerate(stats.ranks)}
    memory |= {"shared": stats.shared_weight_bytes} if len(stats.ranks) > 1 else {}
    queue = queue_of(engine)
    states = {str(state): 0.0 for state in State if state is not State.CLOSED}
    for state, number in engine.session_states().items():
        states[str(state)] = float(number)
    return [
        ("num_requests_running", "Requests in the engine.", "", _one(queue["running"])),
        ("num_requests_waiting", "Requests in the queue.", "", _one(queue["waiting"])),
        (
            "kv_cache_usage_perc",
            "Share of the KV pages of the device that requests and sessions use, 0 to 1: of the "
            "layers with full attention or with windows, the fuller ones.",
            "",
            _one(max(group.referenced / group.total for group in stats.groups)),
        ),
        ("sessions", "Open sessions by activity.", "state", states),
        ("kv_bytes", "Bytes of KV by tier.", "tier", tiers),
        (
            "rank_memory_bytes",
            "Bytes of the weights and of all KV pages that a rank alone has; shared: of the "
            "weights that all ranks read from one copy.",
            "rank",
            {rank: float(number) for rank, number in memory.items()},
        ),
        ("open_handles", "Sequences whose KV the engine holds.", "", _one(stats.handles)),
    ]


def counters(engine: ChatEngine, stats: Stats) -> Gauges:
    """Returns what has been counted since the start."""
    found = stats.tokens_reused + stats.tokens_missed
    return [
        ("prompt_tokens", "Prompt tokens, computed or reused.", "", _one(found)),
        ("generation_tokens", "Generated tokens.", "", _one(stats.tokens_decoded)),
        ("prefix_cache_queries", "Prompt tokens looked up.", "", _one(found)),
        ("prefix_cache_hits", "Prompt tokens whose KV was found.", "", _one(stats.tokens_reused)),
        ("num_preemptions", "Times that a sequence lost its slot.", "", _one(stats.preemptions)),
        (
            "recomputed_tokens",
            "Tokens computed again because other sequences took their pages.",
            "",
            _one(stats.tokens_recomputed),
        ),
        (
            "loaded_tokens",
            "Prompt tokens whose KV was loaded from a lower tier.",
            "",
            _one(stats.tokens_loaded),
        ),
        (
            "requests_refused",
            "Requests refused because too many were waiting.",
            "",
            _one(queue_of(engine)["refused"]),
        ),
    ]


def queue_of(engine: ChatEngine) -> dict[str, Any]:
    """Returns the numbers of running, waiting and refused requests. Never waits."""
    admission = engine._runtime.admission
    return {name: getattr(admission, name) for name in ("running", "waiting", "refused")}


def _one(value: float) -> dict[str, float]:
    return {"": float(value)}
