"""One turn of the load: when it was due, how it ended, and when its tokens arrived."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .event_stream import StreamReader


class Outcome(enum.Enum):
    """How a turn ended."""

    FINISHED = "finished"
    REFUSED = "refused"  # 429, or the same as an error in the stream
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by Ctrl-C; it counts nowhere


@dataclass
class Turn:
    """A turn that was sent. Times are seconds on the loop's clock.

    Attributes:
        due: When the schedule wanted it sent. Waiting times count from here.
        ended: When its response was complete.
        outcome: How it ended.
        kind: Short name of the kind of failure.
        error: What happened, where it failed.
        retry_after: Seconds after which the server wants a refused turn again.
        times: Arrival of each event with tokens.
        counts: Tokens of each such event, where the server lists them.
        prompt_tokens: Tokens of the prompt, by the server.
        completion_tokens: Tokens of the reply, by the server.
        cached_tokens: Tokens of the prompt that the server had cached, by the server.
        text: The reply.
    """

    due: float
    ended: float = 0.0
    outcome: Outcome = Outcome.FAILED
    kind: str = ""
    error: str = ""
    retry_after: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int | None] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""

    def take(self, reader: StreamReader) -> None:
        """Copies what was read from the stream."""
        self.times, self.counts, self.text = reader.times, reader.counts, reader.text
        self.prompt_tokens = reader.prompt_tokens
        self.completion_tokens = reader.completion_tokens
        self.cached_tokens = reader.cached_tokens

    def refuse(self, seconds: float | None, error: str) -> None:
        """Ends the turn as refused for overload."""
        self.outcome, self.retry_after, self.error = Outcome.REFUSED, seconds, error

    def fail(self, kind: str, error: str) -> None:
        """Ends the turn as failed."""
        self.outcome, self.kind, self.error = Outcome.FAILED, kind, error

    @property
    def total(self) -> float:
        """Seconds until the response was complete, also that of a refusal."""
        return self.ended - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token that was visible."""
        return self.times[0] - self.due if self.times else None

    @property
    def tokens(self) -> int:
        """Tokens of the reply: by usage, else by the events' lists, else one per event."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(1 if count is None else count for count in self.counts)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None with fewer than two tokens or events."""
        if len(self.times) < 2 or self.tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    def tokens_by_event(self) -> list[float]:
        """Returns the tokens of each event; usage is spread evenly where events list none."""
        listed = [count for count in self.counts if count is not None]
        if len(listed) == len(self.counts):
            return [float(count) for count in listed]
        return [self.tokens / len(self.times)] * len(self.times)

    def gaps(self) -> list[float]:
        """Returns the inter-token latencies: the time between events / tokens of the later one."""
        counts = self.tokens_by_event()
        return [
            (after - before) / max(count, 1.0)
            for before, after, count in zip(self.times, self.times[1:], counts[1:], strict=False)
        ]
