"""Counters of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turbomind.engine.tiers import TierStats


@dataclass(frozen=True)
class GroupStats:
    """The pages of a cache group: of the layers with full attention, or with windows of one size.

    Attributes:
        window: Tokens of the window; 0: full attention.
        page_bytes: Bytes of a page, which holds the KV of 64 tokens.
        total: Pages of the group: free + referenced + cached.
        free: Pages without content.
        cached: Pages with content that nothing refers to.
        out_of_reach: Pages of `cached` that windows have moved past; they are evicted first.
    """

    window: int
    page_bytes: int
    total: int
    free: int
    cached: int
    out_of_reach: int

    @property
    def referenced(self) -> int:
        """Pages that a handle or request uses."""
        return self.total - self.free - self.cached


@dataclass(frozen=True)
class RankStats:
    """What one rank alone has in memory (tensor parallelism), and the time of its ops.

    Attributes:
        weight_bytes: Bytes of its packed weights.
        cache_bytes: Bytes of its part of all pages of the cache.
        ops: Its profiler's table, as `Stats.ops`.
    """

    weight_bytes: int
    cache_bytes: int
    ops: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stats:
    """Counters since the engine was opened, and what is in use now.

    Attributes:
        pages_total: Pages of the cache: pages_free + pages_referenced + pages_cached.
        pages_free: Pages without content.
        pages_referenced: Pages that a handle or request uses.
        pages_cached: Pages with content that nothing refers to; they may be evicted.
        tokens_prefilled: Prompt tokens computed.
        tokens_decoded: Tokens generated.
        tokens_reused: Prompt tokens whose KV was found (prefix hits).
        steps: Steps of the model.
        steps_overlapped: Steps that a GPU was given before the results of the one before were read
            (asynchronous scheduling).
        preemptions: Times that a sequence lost its slot to others.
        slots: Slots of the batch in use (vLLM: sequences in `running`).
        waiting: Requests without a slot.
        handles: Open handles.
        max_context: Most tokens of one sequence.
        last_step_ms: Duration of the last step, in milliseconds.
        ops: The profiler's table, {op: {"calls", "ns", "bytes", "flops"}}; on a GPU its times are
            those of the device. With several ranks, calls and time are those of the rank that takes
            the longest with the op, bytes and FLOPs are sums over ranks, "reduce" adds the ranks'
            parts of a sum and "reduce_wait" is the time that a rank waits for them; `ranks` has
            the table of each.
        tokens_loaded: Tokens of `tokens_reused` that were loaded from a lower tier for a request.
        pages_loaded: Pages that this engine loaded from lower tiers.
        pages_saved: Pages that this engine saved to lower tiers.
        failed_loads: Pages that could not be loaded; they are computed again.
        failed_saves: Pages that could not be saved; they are computed again when needed.
        tiers: Counters of the lower tiers by name, "host" and "disk".
        cache_bytes: Bytes of all pages of the cache, on all ranks.
        weight_bytes: Bytes of the packed weights of all ranks. What they share (on the CPU
            embedding, head and norms) counts once.
        ranks: Memory and ops by rank; one without tensor parallelism.
        groups: The pages by cache group.
        tokens_missed: Prompt tokens whose KV was not found (prefix misses).
        tokens_recomputed: Tokens computed again because other sequences had taken their pages.
        requests_started: Requests that have had a slot.
        queue_seconds: Time that these requests waited for their first slot, in seconds in all.
        prefixes_awaited: Requests that waited until another one had computed a prefix they share.
    """

    pages_total: int
    pages_free: int
    pages_referenced: int
    pages_cached: int
    tokens_prefilled: int
    tokens_decoded: int
    tokens_reused: int
    steps: int
    steps_overlapped: int
    preemptions: int
    slots: int
    waiting: int
    handles: int
    max_context: int
    last_step_ms: float
    ops: Mapping[str, Any] = field(default_factory=dict)
    tokens_loaded: int = 0
    pages_loaded: int = 0
    pages_saved: int = 0
    failed_loads: int = 0
    failed_saves: int = 0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
    cache_bytes: int = 0
    weight_bytes: int = 0
    ranks: tuple[RankStats, ...] = ()
    groups: tuple[GroupStats, ...] = ()
    tokens_missed: int = 0
    tokens_recomputed: int = 0
    requests_started: int = 0
    queue_seconds: float = 0.0
    prefixes_awaited: int = 0

    @property
    def shared_weight_bytes(self) -> int:
        """Bytes of weights of which all ranks read one copy; 0 with one rank."""
        return self.weight_bytes - sum(rank.weight_bytes for rank in self.ranks)
