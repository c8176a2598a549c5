"""Admission of requests to the engine: a bounded queue in front of the persistent batch.

The engine has at most as many requests as its batch has slots. Of the waiting requests, turns of
live sessions come first: their KV is cached, so they compute little. Among tickets of one kind the
owners share by tokens, not by requests (start-time fair queuing; Goyal, Vin and Cheng, 1996):
tickets are admitted in the order of the virtual time at which their owner would be served if all
owners were served at once. One owner's tickets of one kind are served first in, first out.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from lmchat.errors import InternalError, Overloaded

LIVE_IN_A_ROW = 8
"""Live turns that may pass a waiting request of the other kind before one of those is served."""

_REMEMBERED_OWNERS = 1024  # owners whose last ticket is remembered while others wait


def _log(error: BaseException) -> None:
    logging.getLogger(__name__).error("a request could not be started", exc_info=error)


@dataclass(eq=False)
class Ticket:
    """A request for a slot of the batch.

    Attributes:
        owner: the owner that the computed tokens are accounted to.
        live: whether it continues a sequence with cached KV, and is short.
        cost: number of tokens to compute.
        start: called once on admission, on the thread that enters the ticket or frees the slot;
            never after `withdraw()` has returned True. If it raises, the slot is freed.
        failed: called with the error of `start`. Default: logs it.
    """

    owner: str
    live: bool
    cost: int
    start: Callable[[], object]
    failed: Callable[[BaseException], object] = _log


def priority(ticket: Ticket) -> int:
    """Returns the ticket's priority in the engine: 0 if live, else 1. Lower is served first."""
    return 0 if ticket.live else 1


class Admission:
    """The slots of the batch and the queue for them, for any number of threads.

    No method waits for anything but its own lock. Tickets are started and failed outside it.

    Args:
        capacity: requests that can be in the engine.
        max_queue: requests that can wait.
        busy: called before a ticket is started or queued.
        idle: called after a `leave()` that leaves no request running or waiting.
    """

    def __init__(
        self,
        capacity: int,
        max_queue: int,
        busy: Callable[[], object] = lambda: None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        self.capacity = capacity
        self.max_queue = max_queue
        self.admitted = 0
        """Tickets that have been admitted so far."""
        self.refused = 0
        """Tickets that have been refused so far, because the queue was full."""
        self._busy = busy
        self._idle = idle
        self._lock = threading.Lock()
        self._running: set[Ticket] = set()
        self._live = _Lane()
        self._others = _Lane()
        self._live_in_a_row = 0  # live tickets served in a row while others waited
        self._starting = threading.local()

    @property
    def running(self) -> int:
        """Number of tickets that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of tickets in the queue."""
        return self._live.size + self._others.size

    def _check_room(self) -> None:
        if len(self._running) >= self.capacity and self.waiting >= self.max_queue:
            self.refused += 1
            raise Overloaded(
                f"{self.max_queue} requests are waiting, expected fewer than max_queue="
                f"{self.max_queue}; {self.capacity} are running: try again later"
            )

    @property
    def is_idle(self) -> bool:
        """Returns whether no ticket runs or waits."""
        return not self._running and not self.waiting

    def check(self, owner: str, *, live: bool = False) -> None:
        """Raises Overloaded if a request of the owner would be refused now.

        Args:
            owner: the owner.
            live: whether it is a live turn.
        """
        with self._lock:
            self._check_room()

    def enter(self, ticket: Ticket) -> None:
        """Takes a slot for the ticket or queues it.

        Raises:
            Overloaded: the queue is full.
        """
        with self._lock:
            lane = self._lane(ticket)
            if ticket in self._running or lane.holds(ticket):
                raise InternalError("a ticket entered twice, expected once")
            self._check_room()
            lane.add(ticket)
            granted = self._grant()
        self._busy()
        self._start(granted)

    def leave(self, ticket: Ticket) -> None:
        """Frees the ticket's slot, or takes it out of the queue. Idempotent."""
        with self._lock:
            self._running.discard(ticket)
            self._lane(ticket).remove(ticket)
            granted, is_idle = self._grant(), self.is_idle
        self._start(granted)
        if is_idle:
            self._idle()

    def withdraw(self, ticket: Ticket) -> bool:
        """Takes the ticket out of the queue. Returns False if it has been started already."""
        with self._lock:
            return self._lane(ticket).remove(ticket)

    def _lane(self, ticket: Ticket) -> _Lane:
        return self._live if ticket.live else self._others

    def _grant(self) -> list[Ticket]:
        """Assigns the free slots to waiting tickets, and returns these."""
        granted: list[Ticket] = []
        while len(self._running) < self.capacity and self.waiting:
            ticket = self._next()
            self._running.add(ticket)
            self.admitted += 1
            granted.append(ticket)
        for lane in (self._live, self._others):
            lane.forget_except({ticket.owner for ticket in self._running})
        return granted

    def _next(self) -> Ticket:
        if not self._others.size:
            self._live_in_a_row = 0
            return self._live.pop()
        if self._live.size and self._live_in_a_row < LIVE_IN_A_ROW:
            self._live_in_a_row += 1
            return self._live.pop()
        self._live_in_a_row = 0
        return self._others.pop()

    def _start(self, granted: list[Ticket]) -> None:
        """Starts the tickets. Tickets admitted by a `start` that fails follow in this loop, not in
        a nested call, however many fail at once."""
        pending: deque[Ticket] | None = getattr(self._starting, "pending", None)
        if pending is not None:
            pending += granted
            return
        if not granted:
            return
        pending = self._starting.pending = deque(granted)
        interrupt: BaseException | None = None
        try:
            while pending:
                ticket = pending.popleft()
                try:
                    ticket.start()
                except BaseException as error:
                    self.leave(ticket)
                    ticket.failed(error)
                    if not isinstance(error, Exception):
                        interrupt = error
        finally:
            self._starting.pending = None
            self._start(list(pending))  # the remaining tickets start even if `failed` raises
        if interrupt is not None:
            raise interrupt


class _Lane:
    """Tickets of one kind, ordered by the virtual times of their owners."""

    def __init__(self) -> None:
        self.size = 0
        self._queues: dict[str, OrderedDict[Ticket, None]] = {}  # by owner with waiting tickets
        # By owner: (virtual start of the first ticket, number).
        self._starts: dict[str, tuple[int, int]] = {}
        # By owner: virtual end of the last served ticket.
        self._ends: OrderedDict[str, int] = OrderedDict()
        self._now = 0  # virtual start of the last served ticket
        self._numbers = itertools.count()

    def holds(self, ticket: Ticket) -> bool:
        return ticket in self._queues.get(ticket.owner, ())

    def add(self, ticket: Ticket) -> None:
        owner = ticket.owner
        if owner not in self._queues:
            self._queues[owner] = OrderedDict()
            # Not before now: an owner accumulates no credit while it requests nothing.
            self._set_start(owner, max(self._now, self._ends.get(owner, 0)))
        self._queues[owner][ticket] = None
        self.size += 1

    def remove(self, ticket: Ticket) -> bool:
        if not self.holds(ticket):
            return False
        del self._queues[ticket.owner][ticket]
        self._took_one(ticket.owner)
        return True

    def pop(self) -> Ticket:
        """Removes and returns the next ticket. The lane must not be empty."""
        owner = min(self._starts, key=self._starts.__getitem__)
        ticket, _ = self._queues[owner].popitem(last=False)
        self._now = self._starts[owner][0]
        self._ends[owner] = self._now + max(1, ticket.cost)
        self._ends.move_to_end(owner)
        if len(self._ends) > _REMEMBERED_OWNERS:
            self._ends.popitem(last=False)
        self._set_start(owner, self._now + max(1, ticket.cost))
        self._took_one(owner)
        return ticket

    def forget_except(self, owners: set[str]) -> None:
        """If no ticket waits, clears the virtual times of all other owners."""
        if not self.size:
            for owner in self._ends.keys() - owners:
                del self._ends[owner]

    def _set_start(self, owner: str, start: int) -> None:
        self._starts[owner] = (start, next(self._numbers))

    def _took_one(self, owner: str) -> None:
        self.size -= 1
        if not self._queues[owner]:
            del self._queues[owner], self._starts[owner]
