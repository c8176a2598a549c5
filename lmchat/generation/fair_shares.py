"""Shares of the slots and of the queue among owners.

Two rules apply. Slots: while owners wait, a free slot goes to one of those that hold the fewest
(max-min fairness). Tokens: among these it goes to the one that is first by start-time fair queuing
(Goyal, Vin and Cheng, 1996): owners are served in the order of the virtual time at which they would
be served if all were served at once. An owner's virtual time advances by the tokens of its prompts
and, while they run, by the tokens of its replies.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmchat.generation.ticket import LIVE, ORDINARY, PAUSED, Ticket

_REMEMBERED_OWNERS = 1024  # owners without requests whose virtual time is remembered

Tickets = dict[Ticket, None]  # an ordered set, the oldest first


@dataclass(eq=False)
class Account:
    """The requests of one owner, and its virtual time.

    Attributes:
        held: tickets that have a slot.
        paused: tickets that were started and have lost their slot.
        live, others: tickets in the queue, by kind.
        reserved: tickets with a promised place, which have not entered.
        time: virtual time at which the owner's tokens so far would have been served.
        number: orders owners of equal times by their last service.
    """

    owner: str
    number: int
    time: int = 0
    held: Tickets = field(default_factory=dict)
    paused: Tickets = field(default_factory=dict)
    live: Tickets = field(default_factory=dict)
    others: Tickets = field(default_factory=dict)
    reserved: Tickets = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Number of slots that its tickets hold."""
        return sum(ticket.slots for ticket in self.held)

    def used(self, free: int) -> int:
        """Number of slots that it uses while `free` ones are free: in the engine, a paused ticket
        that needs more than these goes on in them."""
        wide = sum(ticket.slots for ticket in self.paused if ticket.slots > free)
        return self.slots + min(free, wide)

    @property
    def demand(self) -> int:
        """Number of slots that all its tickets together could use."""
        places = (self.held, self.paused, self.live, self.others, self.reserved)
        return sum(ticket.slots for place in places for ticket in place)

    @property
    def wants(self) -> bool:
        """Returns whether a ticket of the owner could use a slot."""
        return bool(self.paused or self.live or self.others)

    @property
    def queued(self) -> int:
        """Number of its tickets in the queue."""
        return len(self.live) + len(self.others)

    @property
    def occupancy(self) -> int:
        """Number of its tickets, those of the engine and of the queue."""
        return len(self.held) + len(self.paused) + self.queued + len(self.reserved)

    def has(self, ticket: Ticket) -> bool:
        """Returns whether the ticket is one of these."""
        places = (self.held, self.paused, self.live, self.others, self.reserved)
        return any(ticket in place for place in places)

    def next(self, live: bool) -> Ticket | None:
        """Returns the next ticket of the kind: a paused one, else the first in the queue."""
        for ticket in self.paused:
            if ticket.live == live:
                return ticket
        return next(iter(self.live if live else self.others), None)

    def newest_held(self) -> Iterator[Ticket]:
        """Yields the tickets that have slots, first the ordinary ones, the newest of a kind
        first."""
        for live in (False, True):
            yield from (ticket for ticket in reversed(self.held) if ticket.live == live)

    def drop(self, ticket: Ticket) -> bool:
        """Removes the ticket wherever it is. Returns whether it was there."""
        places = (self.held, self.paused, self.live, self.others, self.reserved)
        return any(place.pop(ticket, ticket) is None for place in places)


class FairShares:
    """The accounts of all owners. The caller synchronizes calls."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}  # of owners with tickets
        self._times: OrderedDict[str, int] = OrderedDict()  # of owners without
        self._now = 0  # virtual time of the last service
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def find(self, owner: str) -> Account | None:
        """Returns the owner's account, or None if it has no ticket."""
        return self._accounts.get(owner)

    def open(self, owner: str) -> Account:
        """Returns the owner's account. It has no credit from the time without tickets."""
        account = self._accounts.get(owner)
        if account is None:
            time = max(self._now, self._times.pop(owner, 0))
            account = Account(owner, next(self._numbers), time)
            self._accounts[owner] = account
        return account

    def drop(self, ticket: Ticket) -> bool:
        """Removes the ticket. Returns whether it was there."""
        account = self._accounts.get(ticket.owner)
        if account is None or not account.drop(ticket):
            return False
        if not account.occupancy:
            self._close(account)
        return True

    def _close(self, account: Account) -> None:
        del self._accounts[account.owner]
        if any(other.wants for other in self):
            self._times[account.owner] = account.time
            if len(self._times) > _REMEMBERED_OWNERS:
                self._times.popitem(last=False)
        else:  # the past counts only while others wait
            self._times.clear()

    def queue(self, ticket: Ticket) -> None:
        """Adds the ticket to the queue."""
        account = self.open(ticket.owner)
        account.reserved.pop(ticket, None)
        if not account.wants:  # no credit from the time in which it wanted nothing
            account.time = max(account.time, self._now)
        (account.live if ticket.live else account.others)[ticket] = None

    def next(self, free: int, live_first: bool = True) -> Ticket | None:
        """Returns the ticket that gets the next free slots: of the owners that use the fewest,
        live turns first, then in the order of virtual times."""
        wanting = [account for account in self if account.wants]
        if not wanting:
            return None
        fewest = min(account.used(free) for account in wanting)
        equal = [account for account in wanting if account.used(free) == fewest]
        equal.sort(key=lambda account: (account.time, account.number))
        for live in (live_first, not live_first):
            for account in equal:
                if (ticket := account.next(live)) is not None:
                    return ticket
        return None

    def wants(self, live: bool) -> bool:
        """Returns whether a ticket of the kind waits or is paused."""
        return any(account.next(live) is not None for account in self)

    def hold(self, ticket: Ticket) -> bool:
        """Gives the ticket a slot. Returns whether it has not been started before."""
        account = self._accounts[ticket.owner]
        fresh = ticket not in account.paused
        account.drop(ticket)
        account.held[ticket] = None
        account.number = next(self._numbers)
        ticket.priority = LIVE if ticket.live else ORDINARY
        self._now = max(self._now, account.time)
        if fresh:
            account.time = max(account.time, self._now) + max(1, ticket.cost)
        return fresh

    def pause(self, ticket: Ticket) -> None:
        """Takes the slot of a started ticket."""
        account = self._accounts[ticket.owner]
        del account.held[ticket]
        account.paused[ticket] = None
        ticket.priority = PAUSED

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Counts generated tokens towards the cost of the ticket's owner."""
        account = self._accounts.get(ticket.owner)
        if account is not None:
            account.time += tokens

    def unfair(self, free: int) -> tuple[list[Ticket], Ticket] | None:
        """Returns tickets of owners above their share whose slots, beside `free` ones, are enough
        for a ticket of an owner below it, and this ticket; None: there are none.

        An owner is above its share if it holds more slots than the other one will.
        """
        ticket = self.next(free)
        if ticket is None:
            return None
        most = self._accounts[ticket.owner].slots + ticket.slots
        held = {account: account.slots for account in self}
        newest = {account: account.newest_held() for account in self}
        victims: list[Ticket] = []
        while free < ticket.slots:
            above = max(held, key=lambda account: held[account])
            if held[above] <= most:
                return None
            victims.append(next(newest[above]))
            held[above] -= victims[-1].slots
            free += victims[-1].slots
        return victims, ticket

    def displaced_by(self, owner: str) -> Ticket | None:
        """Returns the ordinary ticket whose slot a live turn of the owner takes, or None: of the
        owner that holds the most, if these are more than this owner's, else of this owner."""
        own = self._accounts.get(owner)
        mine = own.slots if own else 0
        found = [a for a in self if a is own or a.slots > mine]
        for account in sorted(found, key=lambda a: a.slots, reverse=True):
            newest = next(account.newest_held(), None)
            if newest is not None and not newest.live:
                return newest
        return None

    def refusable(self, owner: str) -> Ticket | None:
        """Returns the newest queued ticket of the owner furthest above its share, an ordinary one
        if there is one; of equal owners, of `owner`. None: nothing is queued."""
        found = [account for account in self if account.queued]
        if not found:
            return None
        most = max(found, key=lambda a: (a.occupancy, a.owner == owner))
        return next(reversed(most.others or most.live))

    def slots_of(self, owner: str, capacity: int) -> float:
        """Returns the owner's share of slots while it and all others want as many as their tickets
        can use (max-min fairness); below 1 if there are more owners than slots."""
        left, others = float(capacity), sorted(a.demand for a in self if a.owner != owner)
        for i, demand in enumerate(others):
            left -= min(demand, left / (len(others) - i + 1))
        return left
