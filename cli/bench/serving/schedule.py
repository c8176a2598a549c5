"""The schedule of a run: when conversations arrive, and the lengths of their turns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..workload import Row
from .lengths import Lengths
from .plan import Plan
from .texts import Writer


@dataclass(frozen=True)
class PlannedTurn:
    """A turn to come.

    Attributes:
        message: The user's message.
        message_tokens: Tokens of the message, as wanted.
        reply_tokens: Tokens of the reply.
        think: Seconds after the previous reply until the turn is due; 0 in the first turn.
    """

    message: str
    message_tokens: int
    reply_tokens: int
    think: float


@dataclass(frozen=True)
class Conversation:
    """A conversation that arrives `at` seconds after the start of the run."""

    at: float
    turns: tuple[PlannedTurn, ...]


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yields the times of a Poisson process of `rate` arrivals per second.

    Equal seeds give the same process in another unit of time at every rate.
    """
    dice = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        at += dice.expovariate(1.0) / rate
        yield at


def from_trace(rows: Sequence[Row], rate: float, seconds: float) -> list[float]:
    """Returns `rate` * `seconds` arrivals at the intervals of a trace, scaled to fill `seconds`.

    A trace that is too short is repeated.
    """
    count = max(1, round(rate * seconds))
    times = list(itertools.islice(_repeated(rows), count + 1))
    scale = seconds / times[-1] if times[-1] else 0.0
    return [at * scale for at in times[:-1]]


def _repeated(rows: Sequence[Row]) -> Iterator[float]:
    """Yields the seconds of a trace again and again, a mean interval between repetitions."""
    span = rows[-1].seconds - rows[0].seconds
    # A span of 0, where all requests come at once, would leave no time between repetitions.
    period = span * len(rows) / (len(rows) - 1) or float(len(rows))
    for repetition in itertools.count():
        for row in rows:
            yield row.seconds - rows[0].seconds + repetition * period


def schedule(
    plan: Plan,
    rate: float,
    seconds: float,
    arrivals: Iterable[float],
    lengths: Lengths,
    writer: Writer,
    text_seed: str,
) -> list[Conversation]:
    """Returns the conversations that arrive within `seconds`.

    Lengths and think times follow from the plan's seed and the conversation's number, so they are
    the same at every rate. Texts follow from `text_seed`: with another one for each run and rate,
    no server can use KV of an earlier one.

    Args:
        plan: The load.
        rate: Turns per second.
        seconds: Length of the run.
        arrivals: Times of arrivals, of `rate` / `plan.turns` conversations per second.
        lengths: Lengths of messages and replies.
        writer: Writes the messages.
        text_seed: Seed of the texts.
    """
    times = itertools.takewhile(lambda at: at < seconds, arrivals)
    found = []
    for index, at in enumerate(times):
        dice = random.Random(f"conversation {plan.seed} {index}")
        words = random.Random(f"texts {text_seed} {rate} {index}")
        turns = tuple(
            _turn(plan, number, index, lengths, writer, dice, words) for number in range(plan.turns)
        )
        found.append(Conversation(at, turns))
    return found


def _turn(
    plan: Plan,
    number: int,
    index: int,
    lengths: Lengths,
    writer: Writer,
    dice: random.Random,
    words: random.Random,
) -> PlannedTurn:
    message, reply = lengths.draw(index, dice)
    think = dice.expovariate(1.0) * plan.think if number else 0.0
    message = min(message, plan.longest_message or message)
    reply = min(reply, plan.longest_reply or reply)
    return PlannedTurn(writer.text(message, words), message, reply, think)
