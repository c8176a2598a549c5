"""Workload of `bench pressure`: lengths and arrival times from a trace, or generated."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from turbomind.errors import InvalidRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
# (tokens at the mean of the logarithm, deviation of the logarithm) of a published chat trace.
CONTEXT, REPLY = (760, 0.99), (150, 0.86)
MESSAGE = (32, 0.7)  # traces lack the length of the new message
SHORTEST, LONGEST_MESSAGE = 16, 256  # tokens


@dataclass(frozen=True)
class Row:
    """A request of a trace: seconds since its start, tokens of its context, tokens of its reply."""

    seconds: float
    context: int
    generated: int


@dataclass(frozen=True)
class Arrival:
    """A turn of `session` at `at` seconds: `new` tokens of message, `reply` tokens of reply."""

    at: float
    session: int
    new: int
    reply: int


@dataclass(frozen=True)
class Limits:
    """Longest initial context and longest reply, in tokens."""

    history: int
    reply: int


def read_trace(path: str) -> list[Row]:
    """Reads a CSV file with COLUMNS, plain or compressed with xz, gzip or bzip2.

    Raises:
        InvalidRequest: The file cannot be read as such.
    """
    opener = OPENERS.get(Path(path).suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it has no column {missing[0]}")
            found = [_parse(row) for row in reader]
    except (OSError, EOFError, lzma.LZMAError, ValueError, TypeError) as error:
        columns = ",".join(COLUMNS)
        raise InvalidRequest(
            f"--trace is {path!r}, expected a CSV file with the columns {columns}: {error}"
        ) from None
    if len(found) < 2:
        raise InvalidRequest(f"--trace is {path!r}, expected at least two rows")
    found.sort(key=lambda row: row[0])
    start = found[0][0]
    return [Row((at - start).total_seconds(), context, reply) for at, context, reply in found]


def _parse(row: dict[str, str]) -> tuple[datetime, int, int]:
    whole, _, fraction = row["TIMESTAMP"].partition(".")
    # fromisoformat() of Python 3.10 takes six digits at most.
    at = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
    return at, int(row["ContextTokens"]), int(row["GeneratedTokens"])


def generated_rows(count: int, seed: int) -> list[Row]:
    """Returns rows with log-normal lengths (CONTEXT, REPLY) and random arrivals, one per second."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0, count))
    contexts = _lognormal(random, CONTEXT, count)
    replies = _lognormal(random, REPLY, count)
    return [Row(float(t), c, g) for t, c, g in zip(times, contexts, replies, strict=True)]


def _lognormal(random: np.random.Generator, of: tuple[int, float], count: int) -> list[int]:
    values = random.lognormal(np.log(of[0]), of[1], count)
    lengths: list[int] = np.maximum(values.astype(int), 1).tolist()
    return lengths


def histories(rows: Iterable[Row], count: int, tokens: int, limits: Limits) -> list[int]:
    """Returns initial contexts: one per row, at most `count`, and at most `tokens` in all."""
    found: list[int] = []
    total = 0
    for row in rows:
        length = min(max(row.context, SHORTEST), limits.history)
        total += length
        if len(found) == count or (found and total > tokens):
            break
        found.append(length)
    return found


def arrivals(
    rows: list[Row], count: int, window: float, sessions: int, limits: Limits, seed: int
) -> list[Arrival]:
    """Returns turns within `window` seconds, with the intervals of the trace, scaled.

    Args:
        rows: The trace.
        count: Number of turns, at most.
        window: Seconds in which they arrive.
        sessions: Number of sessions; each turn is of one of them, uniformly at random.
        limits: Longest reply.
        seed: Seed of sessions and message lengths.
    """
    used = rows[:count]
    random = np.random.default_rng(seed)
    sessions_of_turns = random.integers(0, sessions, len(used)).tolist()
    messages = _lognormal(random, MESSAGE, len(used))
    start, span = used[0].seconds, used[-1].seconds - used[0].seconds
    return [
        Arrival(
            at=(row.seconds - start) / span * window if span else 0.0,
            session=session,
            new=min(max(new, 1), LONGEST_MESSAGE),
            reply=min(max(row.generated, 1), limits.reply),
        )
        for row, session, new in zip(used, sessions_of_turns, messages, strict=True)
    ]
