"""Who enters the engine next: a bounded queue in front of the persistent batch.

At most as many requests are in the engine as its batch has rows. Of those that wait, turns of live
sessions come first: their past is kept and what they compute is short. Among tickets of one kind
the owners share by tokens, not by requests (start-time fair queuing; Goyal, Vin and Cheng, 1996):
a ticket's turn comes in the order of a virtual time at which its owner would be served if all
owners were served at once. An owner's tickets of one kind are served in the order they came.
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

_KNOWN_OWNERS = 1024  # whose last ticket is remembered while others wait


def _log(error: BaseException) -> None:
    logging.getLogger(__name__).error("a request could not be started", exc_info=error)


@dataclass(eq=False)
class Ticket:
    """A request that wants a place in the batch.

    `live`: it continues a sequence whose keys and values are kept, and is short. `cost` is the
    number of tokens to compute. `start` is called once, when it is admitted, on the thread that
    enters or that frees the place; never after `withdraw()` has said True. When it raises, the
    place is free again and `failed` gets the error.
    """

    owner: str
    live: bool
    cost: int
    start: Callable[[], object]
    failed: Callable[[BaseException], object] = _log


def priority(ticket: Ticket) -> int:
    """The engine's priority of a ticket: 0 for live ones, 1 for others; lower is served first."""
    return 0 if ticket.live else 1


class Admission:
    """The places of the batch and the queue for them, for any number of threads.

    `capacity` requests can be in the engine, `max_queue` can wait. No method waits for anything but
    its own lock; tickets are started and failed outside it. `busy` is called before a ticket is
    started or queued, `idle` after a `leave()` when none runs or waits any more.
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
        """Tickets that got a place, ever."""
        self.refused = 0
        """Tickets that found the queue full, ever."""
        self._busy = busy
        self._idle = idle
        self._lock = threading.Lock()
        self._running: set[Ticket] = set()
        self._live = _Lane()
        self._others = _Lane()
        self._passed = 0  # live tickets served while others waited, since one of those was
        self._starting = threading.local()

    @property
    def running(self) -> int:
        """Tickets that have a place."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Tickets that wait for one."""
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
        """Whether none runs or waits."""
        return not self._running and not self.waiting

    def enter(self, ticket: Ticket) -> None:
        """Takes a place for the ticket or puts it in the queue. Raises Overloaded when that is
        full."""
        with self._lock:
            lane = self._lane(ticket)
            if ticket in self._running or lane.holds(ticket):
                raise InternalError("a ticket can enter only once")
            self._check_room()
            lane.add(ticket)
            granted = self._grant()
        self._busy()
        self._start(granted)

    def leave(self, ticket: Ticket) -> None:
        """Frees the ticket's place, or takes it out of the queue. Any number of times."""
        with self._lock:
            self._running.discard(ticket)
            self._lane(ticket).remove(ticket)
            granted, is_idle = self._grant(), self.is_idle
        self._start(granted)
        if is_idle:
            self._idle()

    def withdraw(self, ticket: Ticket) -> bool:
        """Takes the ticket out of the queue, if it still waits there: then it is never started."""
        with self._lock:
            return self._lane(ticket).remove(ticket)

    def _lane(self, ticket: Ticket) -> _Lane:
        return self._live if ticket.live else self._others

    def _grant(self) -> list[Ticket]:
        """Gives the free places away."""
        granted: list[Ticket] = []
        while len(self._running) < self.capacity and self.waiting:
            ticket = self._next()
            self._running.add(ticket)
            self.admitted += 1
            granted.append(ticket)
        for lane in (self._live, self._others):
            lane.forget_but({ticket.owner for ticket in self._running})
        return granted

    def _next(self) -> Ticket:
        if not self._others.size:
            self._passed = 0
            return self._live.pop()
        if self._live.size and self._passed < LIVE_IN_A_ROW:
            self._passed += 1
            return self._live.pop()
        self._passed = 0
        return self._others.pop()

    def _start(self, granted: list[Ticket]) -> None:
        """Starts the tickets. Those that a `start` makes room for follow it on the same thread and
        not inside it, however many fail at once."""
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
            self._start(list(pending))  # nobody is left behind when `failed` raises
        if interrupt is not None:
            raise interrupt


class _Lane:
    """Tickets of one kind, ordered by the virtual times of their owners."""

    def __init__(self) -> None:
        self.size = 0
        self._queues: dict[str, OrderedDict[Ticket, None]] = {}  # of owners who wait
        self._starts: dict[str, tuple[int, int]] = {}  # of their first tickets: (virtual, number)
        self._ends: OrderedDict[str, int] = OrderedDict()  # of the tickets served last, virtual
        self._now = 0  # virtual start of the last served ticket
        self._numbers = itertools.count()

    def holds(self, ticket: Ticket) -> bool:
        return ticket in self._queues.get(ticket.owner, ())

    def add(self, ticket: Ticket) -> None:
        owner = ticket.owner
        if owner not in self._queues:
            self._queues[owner] = OrderedDict()
            # Not before now: time in which an owner asked for nothing is not saved up.
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
        """The next ticket; there must be one."""
        owner = min(self._starts, key=self._starts.__getitem__)
        ticket, _ = self._queues[owner].popitem(last=False)
        self._now = self._starts[owner][0]
        self._ends[owner] = self._now + max(1, ticket.cost)
        self._ends.move_to_end(owner)
        if len(self._ends) > _KNOWN_OWNERS:
            self._ends.popitem(last=False)
        self._set_start(owner, self._now + max(1, ticket.cost))
        self._took_one(owner)
        return ticket

    def forget_but(self, owners: set[str]) -> None:
        """When nobody waits, only what runs now counts against its owner."""
        if not self.size:
            for owner in self._ends.keys() - owners:
                del self._ends[owner]

    def _set_start(self, owner: str, start: int) -> None:
        self._starts[owner] = (start, next(self._numbers))

    def _took_one(self, owner: str) -> None:
        self.size -= 1
        if not self._queues[owner]:
            del self._queues[owner], self._starts[owner]
