"""A request for a slot of the batch, its priority in the engine, and counters of the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lmchat.errors import Overloaded

LIVE, ORDINARY, PAUSED, IDLE = 0, 1, 2, 3
"""Priorities in the engine; lower is served first. A paused request has been started, but holds no
slot while other owners wait. IDLE is that of idle prefill."""


def _log(error: BaseException) -> None:
    logging.getLogger(__name__).error("a request could not be started", exc_info=error)


def _ignore(_: object) -> None:
    pass


@dataclass(eq=False)
class Ticket:
    """A request for a slot of the batch.

    Attributes:
        owner: the owner that its tokens are accounted to.
        live: whether it continues a conversation with cached KV, and is short.
        cost: number of prompt tokens to compute.
        start: called once on admission, on the thread that enters the ticket or frees the slot;
            never after `withdraw()` has returned True. If it raises, the slot is freed.
        failed: called with the error of `start`. Default: logs it.
        refused: called when the queued ticket gives its place to another owner, on the thread that
            enters the other one. The ticket is never started then.
        reprioritize: called with each new `priority` after `start`, under the lock of `Admission`:
            it must neither wait nor call `Admission`.
        limit: largest number of tokens of each choice; None: unknown; 0: the prompt is scored.
        choices: number of its choices that have not ended. Each takes a slot.
        priority: its priority in the engine now.
        produced: tokens of all choices generated so far.
    """

    owner: str
    live: bool
    cost: int
    start: Callable[[], object]
    failed: Callable[[BaseException], object] = _log
    refused: Callable[[Overloaded], object] = _ignore
    reprioritize: Callable[[int], object] = _ignore
    limit: int | None = None
    choices: int = 1
    slots: int = field(init=False)
    """Slots that it takes: one for each choice, at most all that there are."""
    all_choices: int = field(init=False)
    """Number of its choices, those that have ended included."""
    priority: int = field(init=False)
    produced: int = field(default=0, init=False)
    started: float | None = field(default=None, init=False)
    """Time of its start; None: not started, or paused since."""
    last_token: float | None = field(default=None, init=False)
    """Time of its last token; None: it has none, or was paused since."""

    def __post_init__(self) -> None:
        self.priority = LIVE if self.live else ORDINARY
        self.slots = self.all_choices = self.choices

    @property
    def scores(self) -> bool:
        """Whether its prompt is scored and nothing is generated."""
        return self.limit == 0


@dataclass(frozen=True)
class QueueStats:
    """Requests in the engine and in the queue before it.

    Attributes:
        running: requests in the engine, the paused ones included.
        running_live: live turns among them.
        paused: requests among them that hold no slot while others do.
        waiting: requests in the queue.
        waiting_live: live turns among them.
        admitted: requests started so far.
        refused: requests refused so far.
        refused_queued: requests among them that had been in the queue.
        preempted_for_share: times that a request lost its slot to another owner.
        preempted_for_live: times that a request lost its slot to a live turn of its owner.
        expected_wait: predicted seconds in the queue of a request that came now, of an owner
            without any other; 0 before there are measurements.
    """

    running: int = 0
    running_live: int = 0
    paused: int = 0
    waiting: int = 0
    waiting_live: int = 0
    admitted: int = 0
    refused: int = 0
    refused_queued: int = 0
    preempted_for_share: int = 0
    preempted_for_live: int = 0
    expected_wait: float = 0.0
