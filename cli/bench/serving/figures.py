"""The figures of a run: latencies, throughput, goodput, refusals, failures, capacity."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .load import Observed
from .turn import Outcome, Turn

LAG_LIMIT = 0.01
"""P99 of the event loop's lag, in seconds, above which a run is marked."""

CAPACITY_SHARE = 0.97
"""Share of finished turns up to which a rate counts as within the capacity."""

LATENCIES = ("ttft", "tpot", "itl", "total")


@dataclass(frozen=True)
class Limits:
    """Latencies, in seconds, that a turn must keep to count for the goodput."""

    ttft: float
    tpot: float

    def kept(self, turn: Turn) -> bool:
        """Returns whether a finished turn keeps both limits; one token has no TPOT."""
        if turn.outcome is not Outcome.FINISHED or turn.ttft is None:
            return False
        return turn.ttft <= self.ttft and (turn.tpot is None or turn.tpot <= self.tpot)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Returns count, median, P90 and P99 of values; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    median, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
    return {"count": len(known), "median": median, "p90": p90, "p99": p99}


def figures(rate: float, observed: Observed, limits: Limits) -> dict[str, Any]:
    """Returns the JSON-able figures of one rate.

    Latencies are of the finished turns that were due in the window. Output tokens count by the time
    of their arrival, prompts by that of their first token: both are of any turn, so that what
    reaches into the window stands for what reaches beyond it.

    Args:
        rate: The wanted turns per second.
        observed: The run.
        limits: Those of the goodput.
    """
    turns = observed.measured()
    seconds = max(observed.end - observed.begin, 0.0)
    by = {outcome: [t for t in turns if t.outcome is outcome] for outcome in Outcome}
    finished, refused = by[Outcome.FINISHED], by[Outcome.REFUSED]
    good = [turn for turn in finished if limits.kept(turn)]
    gaps = [gap for turn in finished for gap in turn.gaps()]
    lag = spread(observed.lags)
    return {
        "rate": rate,
        "seconds": seconds,
        "sent": len(turns),
        "rate_reached": _per(len(turns), seconds),
        **{outcome.value: len(by[outcome]) for outcome in (*Outcome,)[:3]},
        "interrupted": observed.interrupted,
        "finished_share": len(finished) / len(turns) if turns else None,
        "ttft": spread(turn.ttft for turn in finished),
        "tpot": spread(turn.tpot for turn in finished),
        "itl": spread(gaps),
        "event_gap": _event_gap(finished),
        "total": spread(turn.total for turn in finished),
        "refusal": spread(turn.total for turn in refused),
        "retry_after": spread(turn.retry_after for turn in refused),
        "output_tokens_per_second": _per(_output_tokens(observed), seconds),
        "input_tokens_per_second": _per(_input_tokens(observed), seconds),
        "good": len(good),
        "goodput": _per(sum(turn.tokens for turn in good), seconds),
        "prompt_tokens": _total(turn.prompt_tokens for turn in finished),
        "cached_tokens": _total(turn.cached_tokens for turn in finished),
        "output_tokens": sum(turn.tokens for turn in finished),
        "streams": _streams(observed),
        "errors": _errors(by[Outcome.FAILED]),
        "lag": None if lag is None else {**lag, "max": max(observed.lags)},
        "lagging": lag is not None and lag["p99"] > LAG_LIMIT,
        "client_cpu": observed.cpu,
    }


def capacity(rates: Sequence[dict[str, Any]]) -> float | None:
    """Returns the highest rate at which CAPACITY_SHARE of the turns finish, or None."""
    within = [each["rate"] for each in rates if (each["finished_share"] or 0.0) >= CAPACITY_SHARE]
    return max(within, default=None)


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _event_gap(turns: Sequence[Turn]) -> float | None:
    """Returns the mean seconds between two events, whatever number of tokens they carry."""
    gaps = [b - a for turn in turns for a, b in itertools.pairwise(turn.times)]
    return float(np.mean(gaps)) if gaps else None


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _output_tokens(observed: Observed) -> float:
    return sum(
        tokens
        for turn in observed.turns
        for at, tokens in zip(turn.times, turn.tokens_by_event(), strict=True)
        if observed.begin <= at < observed.end
    )


def _input_tokens(observed: Observed) -> int:
    return sum(
        turn.prompt_tokens or 0
        for turn in observed.turns
        if turn.times and observed.begin <= turn.times[0] < observed.end
    )


def _streams(observed: Observed) -> dict[str, float]:
    """Returns the mean and the largest number of turns that ran at once in the window."""
    begin, end = observed.begin, observed.end
    spans = [
        (max(turn.due, begin), min(turn.ended, end))
        for turn in observed.turns
        if turn.due < end and turn.ended > begin
    ]
    changes = sorted((at, step) for span in spans for at, step in zip(span, (1, -1), strict=True))
    running = most = 0
    for _, step in changes:
        running += step
        most = max(most, running)
    return {"mean": _per(sum(b - a for a, b in spans), max(end - begin, 0.0)), "most": most}


def _errors(failed: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """Returns kind of failure -> its count and one example."""
    found: dict[str, dict[str, Any]] = {}
    for turn in failed:
        entry = found.setdefault(turn.kind, {"count": 0, "example": turn.error})
        entry["count"] += 1
    return found
