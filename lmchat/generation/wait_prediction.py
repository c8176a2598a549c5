"""Predicts how long a request waits for a slot, from measured speeds and the work before it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from lmchat.generation.ticket import Ticket

_NEW = 0.1  # weight of a new measurement in a moving average
_LEAST_REST = 0.25  # a reply longer than expected is expected to go on for this share of the mean
UNKNOWN = 1.0  # seconds until a retry, before there are measurements


class WaitPrediction:
    """Moving averages of what requests take. The caller synchronizes calls.

    Before a reply or a scoring has ended it predicts no wait.
    """

    def __init__(self) -> None:
        self.token_seconds = 0.0
        """Mean seconds between two tokens of a running request; 0: not measured."""
        self.prompt_seconds = 0.0
        """Mean seconds that a prompt token to compute adds to the first token."""
        self.mean_length = 0.0
        """Mean number of tokens of a reply; 0: none has ended."""
        self.score_seconds = 0.0
        """Mean seconds that a scoring takes per token of its prompt; 0: none has ended."""
        self._gap = _Average()
        self._length = _Average()
        self._prompts = _Average()  # tokens
        self._prompt_times = _Average()  # seconds
        self._scored = _Average()  # tokens
        self._scored_times = _Average()  # seconds

    @property
    def is_measured(self) -> bool:
        """Returns whether there are measurements to predict from."""
        return (self.mean_length > 0 and self.token_seconds > 0) or self.score_seconds > 0

    def tokens(self, ticket: Ticket, count: int, now: float) -> None:
        """Records that the ticket's request has generated `count` tokens at `now`."""
        if ticket.last_token is not None and now > ticket.last_token:
            self.token_seconds = self._gap.add((now - ticket.last_token) / count)
        elif not ticket.produced and ticket.started is not None and now > ticket.started:
            taken = max(0.0, now - ticket.started - self.token_seconds)
            times, prompts = self._prompt_times.add(taken), self._prompts.add(max(1, ticket.cost))
            self.prompt_seconds = times / prompts
        ticket.last_token = now
        ticket.produced += count

    def ended(self, ticket: Ticket) -> None:
        """Records the end of a request."""
        if ticket.produced:
            self.mean_length = self._length.add(ticket.produced / ticket.all_choices)

    def scored(self, ticket: Ticket, now: float) -> None:
        """Records that the ticket's prompt has been scored at `now`."""
        if ticket.started is not None and now > ticket.started:  # it was not paused
            times = self._scored_times.add(now - ticket.started)
            self.score_seconds = times / self._scored.add(ticket.cost)

    def rest(self, ticket: Ticket) -> float:
        """Returns the seconds in which the ticket still needs its slots."""
        if ticket.scores:
            return ticket.cost * self.score_seconds
        produced = ticket.produced / ticket.all_choices
        tokens = max(self.mean_length - produced, _LEAST_REST * self.mean_length)
        if ticket.limit is not None:
            tokens = min(tokens, max(0, ticket.limit - produced))
        prompt = 0.0 if ticket.produced else ticket.cost * self.prompt_seconds
        return prompt + tokens * self.token_seconds * ticket.choices / ticket.slots

    def first_token(self, cost: int) -> float:
        """Returns the seconds from a slot to the first token of a prompt of `cost` tokens."""
        return cost * self.prompt_seconds + self.token_seconds

    def first_result(self, ticket: Ticket) -> float:
        """Returns the seconds from a slot to the ticket's first token, or to its scores."""
        return self.rest(ticket) if ticket.scores else self.first_token(ticket.cost)

    def wait(
        self, started: Iterable[Ticket], queued: Iterable[Ticket], share: float, slots: int = 1
    ) -> float:
        """Returns the seconds until there are free slots for a request after these.

        Args:
            started: tickets of the owner in the engine.
            queued: tickets of the owner that are served first.
            share: the owner's share of slots; below 1: it has a slot part of the time.
            slots: slots that the request needs.
        """
        if not self.is_measured:
            return 0.0
        count = max(1, int(share))
        ends = sorted(self.rest(ticket) for ticket in started for _ in range(ticket.slots))
        later = [(seconds, 1) for seconds in ends[count:]]  # they wait for a slot themselves
        ends = [0.0] * (count - len(ends)) + ends[:count]
        for seconds, width in (*later, *((self.rest(one), one.slots) for one in queued)):
            taken = [heapq.heappop(ends) for _ in range(min(width, count))]
            for _ in taken:
                heapq.heappush(ends, taken[-1] + seconds)
        return heapq.nsmallest(min(slots, count), ends)[-1] / min(1.0, share)


class _Average:
    """A moving average that begins as the plain mean of its first values."""

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, value: float) -> float:
        self._count += 1
        self._value += (value - self._value) * max(_NEW, 1 / self._count)
        return self._value
