"""Admission of requests to the engine: a bounded queue in front of the persistent batch.

Each choice of a request takes a slot of the batch. Owners share the slots and the queue by the
rules of `fair_shares`; a slot is reclaimed by a worse priority in the engine, where the request
then waits with its KV. A live turn, which continues a conversation with cached KV and computes
little, takes the slot of another reply. The queue is bounded by a number of requests and by the
predicted wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from lmchat.errors import InternalError, Overloaded
from lmchat.generation.fair_shares import Account, FairShares
from lmchat.generation.ticket import QueueStats, Ticket
from lmchat.generation.wait_prediction import UNKNOWN, WaitPrediction
from turbomind.params import wrong

LIVE_IN_A_ROW = 8
"""Live turns that may pass a waiting request of the other kind before one of those is served."""

MAX_QUEUE = 256  # requests
MAX_WAIT = 30.0  # seconds

_LEAST_RETRY = 0.05  # seconds
_RESERVED_PART = 8  # live turns leave at least 1 / 8 of the slots to other requests that have them


def check_queue(max_queue: int = MAX_QUEUE, max_wait: float = MAX_WAIT) -> None:
    """Raises InvalidRequest for a number of requests or a time that is out of range."""
    if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
        raise wrong("max_queue", max_queue, "an integer of 0 or more")
    if isinstance(max_wait, bool) or not isinstance(max_wait, int | float) or not max_wait > 0:
        raise wrong("max_wait", max_wait, "a number above 0")


class Admission:
    """The slots of the batch and the queue for them, for any number of threads.

    No method waits for anything but its own lock. Tickets are started, failed and refused outside
    it.

    Args:
        capacity: slots of the batch.
        max_queue: requests that can wait.
        busy: called before a ticket is started or queued.
        idle: called after a `leave()` or `release()` that leaves no request running or waiting. Any
            thread.
        max_wait: largest predicted wait for the first token, in seconds.
        clock: returns seconds, as the times of `charge()`.
    """

    def __init__(
        self,
        capacity: int,
        max_queue: int,
        busy: Callable[[], object] = lambda: None,
        idle: Callable[[], object] = lambda: None,
        max_wait: float = MAX_WAIT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity = capacity
        self.max_queue = max_queue
        self.max_wait = max_wait
        self.admitted = 0
        """Tickets that have been admitted so far."""
        self.refused = 0
        """Tickets that have been refused so far, those in the queue included."""
        self._refused_queued = 0
        self._preempted_for_share = 0
        self._preempted_for_live = 0
        self._busy = busy
        self._idle = idle
        self._clock = clock
        self._lock = threading.Lock()
        self._shares = FairShares()
        self._prediction = WaitPrediction()
        self._live_in_a_row = 0  # live tickets served in a row while others waited
        self._starting = threading.local()

    # --- what there is ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of tickets that have been started, those without a slot included."""
        with self._lock:
            return self._held + sum(len(a.paused) for a in self._shares)

    @property
    def waiting(self) -> int:
        """Number of tickets in the queue."""
        with self._lock:
            return self._queued

    @property
    def is_idle(self) -> bool:
        """Returns whether no ticket runs, waits or is promised a place."""
        return len(self._shares) == 0

    def stats(self) -> QueueStats:
        """Returns the counters."""
        with self._lock:
            started = [t for a in self._shares for t in (*a.held, *a.paused)]
            return QueueStats(
                running=len(started),
                running_live=sum(ticket.live for ticket in started),
                paused=sum(len(account.paused) for account in self._shares),
                waiting=self._queued,
                waiting_live=sum(len(account.live) for account in self._shares),
                admitted=self.admitted,
                refused=self.refused,
                refused_queued=self._refused_queued,
                preempted_for_share=self._preempted_for_share,
                preempted_for_live=self._preempted_for_live,
                expected_wait=self._expected_wait("", live=False),
            )

    @property
    def _held(self) -> int:
        """Number of slots that tickets hold."""
        return sum(account.slots for account in self._shares)

    # --- entering and leaving --------------------------------------------------------------------

    def check(self, owner: str, *, live: bool = False, cost: int = 1, choices: int = 1) -> None:
        """Raises Overloaded if a request of the owner would be refused now.

        Args:
            owner: the owner.
            live: whether it is a live turn.
            cost: number of prompt tokens to compute.
            choices: number of its choices.
        """
        with self._lock:
            first = self._prediction.first_token(cost)
            self._check(owner, live, min(choices, self.capacity), first)

    def reserve(self, ticket: Ticket) -> None:
        """Promises the ticket a place: its `enter()` will not be refused. `release()` gives it up.

        Raises:
            Overloaded: there is no place, or the predicted wait is too long.
        """
        with self._lock:
            self._check_new(ticket)
            self._shares.open(ticket.owner).reserved[ticket] = None

    def release(self, ticket: Ticket) -> None:
        """Releases the reservation of a ticket that has not entered. Idempotent. Unlike `leave()`
        it starts no other ticket."""
        with self._lock:
            account = self._shares.find(ticket.owner)
            if account is None or ticket not in account.reserved:
                return
            self._shares.drop(ticket)
            is_idle = self.is_idle
        if is_idle:
            self._idle()

    def enter(self, ticket: Ticket) -> None:
        """Takes a slot for the ticket or queues it.

        Raises:
            Overloaded: it has no reservation, and there is no place or the predicted wait is too
                long.
        """
        with self._lock:
            account = self._shares.find(ticket.owner)
            reserved = account is not None and ticket in account.reserved
            if not reserved:
                self._check_new(ticket)
            self._shares.queue(ticket)
            granted = self._balance()
            if ticket.live:
                self._displace(ticket, granted)
            refused = self._shrink(ticket)
        self._busy()
        for other, error in refused:
            other.refused(error)
        self._start(granted)

    def leave(self, ticket: Ticket) -> None:
        """Frees the ticket's slot, its place in the queue or its reservation. Idempotent."""
        with self._lock:
            account = self._shares.find(ticket.owner)
            if account is not None and (ticket in account.held or ticket in account.paused):
                self._prediction.ended(ticket)
            self._shares.drop(ticket)
            granted, is_idle = self._balance(), self.is_idle
        self._start(granted)
        if is_idle:
            self._idle()

    def withdraw(self, ticket: Ticket) -> bool:
        """Takes the ticket out of the queue. Returns False if it has been started already."""
        with self._lock:
            account = self._shares.find(ticket.owner)
            if account is None or (ticket not in account.live and ticket not in account.others):
                return False
            return self._shares.drop(ticket)

    def charge(self, ticket: Ticket, tokens: int, now: float) -> None:
        """Counts `tokens` generated tokens of a running ticket towards its owner's cost.

        Args:
            ticket: the ticket of the request.
            tokens: number of new tokens.
            now: when the engine generated them, in seconds of the clock.
        """
        with self._lock:
            self._shares.charge(ticket, tokens)
            self._prediction.tokens(ticket, tokens, now)

    def scored(self, ticket: Ticket) -> None:
        """Records that the prompt of a running ticket has been scored."""
        with self._lock:
            self._prediction.scored(ticket, self._clock())

    def choice_ended(self, ticket: Ticket) -> None:
        """Frees the slot of a choice that has ended before others of its request."""
        with self._lock:
            ticket.choices -= 1
            if not 0 < ticket.choices < ticket.slots:
                return
            ticket.slots = ticket.choices
            granted = self._balance()
        self._start(granted)

    def _check_new(self, ticket: Ticket) -> None:
        """Raises Overloaded unless the ticket has a place."""
        account = self._shares.find(ticket.owner)
        if account is not None and account.has(ticket):
            raise InternalError("a ticket entered twice, expected once")
        ticket.slots = min(ticket.choices, self.capacity)
        first = self._prediction.first_result(ticket)
        self._check(ticket.owner, ticket.live, ticket.slots, first)

    # --- the bounds of the queue -----------------------------------------------------------------

    def _check(self, owner: str, live: bool, slots: int, first: float) -> None:
        """Raises Overloaded unless a request of the owner has a place, whose first token comes
        `first` seconds after it gets a slot."""
        if self._gets_slots(owner, live, slots):
            return
        queued = self._queued + sum(len(account.reserved) for account in self._shares)
        if queued >= self.max_queue and not self._may_replace(owner):
            self.refused += 1
            raise self._overloaded(
                f"{queued} requests are waiting, expected fewer than max_queue="
                f"{self.max_queue}; {self._held} are running",
                self._next_end(),
            )
        wait = self._expected_wait(owner, live, slots) + first
        if self._prediction.is_measured and wait > self.max_wait:
            self.refused += 1
            raise self._overloaded(
                f"the first token is expected in {wait:.1f} seconds, expected at most "
                f"max_wait={self.max_wait:g}",
                wait - self.max_wait,
            )

    @property
    def _queued(self) -> int:
        return sum(account.queued for account in self._shares)

    def _overloaded(self, why: str, retry_after: float) -> Overloaded:
        retry = max(_LEAST_RETRY, retry_after)
        return Overloaded(f"{why}: try again in {retry:.2g} seconds", retry_after=retry)

    def _next_end(self) -> float:
        """Returns the predicted seconds until a running request ends."""
        if not self._prediction.is_measured:
            return UNKNOWN
        ends = [self._prediction.rest(t) for a in self._shares for t in a.held]
        return min(ends, default=UNKNOWN)

    def _gets_slots(self, owner: str, live: bool, slots: int) -> bool:
        """Returns whether a request of the owner would be started at once."""
        shares = self._shares
        own = shares.find(owner)
        if own is None or not own.wants:
            reserved = sum(ticket.slots for account in shares for ticket in account.reserved)
            if self._held + reserved + slots <= self.capacity:
                return True
            mine = own.slots + sum(ticket.slots for ticket in own.reserved) if own else 0
            if max((account.slots for account in shares), default=0) > mine + slots:
                return True
        if not live or (own is not None and own.next(live=True) is not None):
            return False  # a live turn of its owner that waits longer is started first
        other = self._displaced(owner)
        return other is not None and slots <= self._free + other.slots

    def _may_replace(self, owner: str) -> bool:
        """Returns whether a queued request of another owner gives its place to one of `owner`."""
        other, own = self._shares.refusable(owner), self._shares.find(owner)
        if other is None or other.owner == owner:
            return False
        account = self._shares.find(other.owner)
        assert account is not None
        return account.occupancy > (own.occupancy if own else 0) + 1

    def _expected_wait(self, owner: str, live: bool, slots: int = 1) -> float:
        share = self._shares.slots_of(owner, self.capacity)
        own = self._shares.find(owner) or Account(owner, 0)
        queued = [*own.live] if live else [*own.live, *own.others, *own.reserved]
        return self._prediction.wait([*own.held, *own.paused], queued, share, slots)

    def _shrink(self, entered: Ticket) -> list[tuple[Ticket, Overloaded]]:
        """Takes queued tickets that are too many out of the queue, and returns them."""
        refused: list[tuple[Ticket, Overloaded]] = []
        while self._queued > self.max_queue:
            ticket = self._shares.refusable(entered.owner)
            if ticket is None or ticket is entered:  # it was promised a place
                break
            self._shares.drop(ticket)
            self.refused += 1
            self._refused_queued += 1
            why = f"a request of another owner took the place in a queue of {self.max_queue}"
            refused.append((ticket, self._overloaded(why, self._next_end())))
        return refused

    # --- the slots -------------------------------------------------------------------------------

    def _balance(self) -> list[Ticket]:
        """Assigns slots by the owners' shares, and returns the tickets to start.

        A ticket that needs more slots than are free waits for them, and the next ones wait behind
        it: else it might never start.
        """
        granted: list[Ticket] = []
        while (ticket := self._next()) is not None and ticket.slots <= self._free:
            self._count_live(ticket)
            self._hold(ticket, granted)
        while (found := self._shares.unfair(self._free)) is not None:
            above, ticket = found
            for one in above:
                self._pause(one)
                self._preempted_for_share += 1
            self._hold(ticket, granted)
        return granted

    @property
    def _free(self) -> int:
        return self.capacity - self._held

    def _next(self) -> Ticket | None:
        return self._shares.next(self._free, live_first=self._live_in_a_row < LIVE_IN_A_ROW)

    def _count_live(self, ticket: Ticket) -> None:
        passes = ticket.live and self._shares.wants(live=False)
        self._live_in_a_row = self._live_in_a_row + 1 if passes else 0

    def _displaced(self, owner: str) -> Ticket | None:
        """Returns the ticket whose slot a live turn of the owner may take, or None."""
        if self.capacity == 1 and self._live_in_a_row >= LIVE_IN_A_ROW:
            return None
        ordinary = sum(t.slots for a in self._shares for t in a.held if not t.live)
        spare = max(1, self.capacity // _RESERVED_PART) if self.capacity > 1 else 0
        return self._shares.displaced_by(owner) if ordinary > spare else None

    def _displace(self, ticket: Ticket, granted: list[Ticket]) -> None:
        """Gives the slot of another ticket to a live turn, or to one of its owner that waits
        longer."""
        account = self._shares.find(ticket.owner)
        if account is None or ticket not in account.live:
            return
        first = account.next(live=True)
        assert first is not None
        if first.slots > self._free:  # else only a request of many choices is before it
            other = self._displaced(ticket.owner)
            if other is None or first.slots > self._free + other.slots:
                return
            self._pause(other)
            if other.owner == ticket.owner:
                self._preempted_for_live += 1
            else:
                self._preempted_for_share += 1
        self._count_live(first)
        self._hold(first, granted)
        granted += self._balance()  # the other may have had several slots

    def _hold(self, ticket: Ticket, granted: list[Ticket]) -> None:
        if self._shares.hold(ticket):
            self.admitted += 1
            ticket.started = self._clock()
            granted.append(ticket)
        else:
            ticket.reprioritize(ticket.priority)

    def _pause(self, ticket: Ticket) -> None:
        self._shares.pause(ticket)
        ticket.started = ticket.last_token = None  # the time until the next token is a pause
        ticket.reprioritize(ticket.priority)

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
