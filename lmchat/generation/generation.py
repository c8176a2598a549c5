"""One generation: the events of its request, the parts of its reply, and its end."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

from lmchat.errors import Error, InternalError, NotFound
from lmchat.generation.interruptible_event import InterruptibleEvent
from lmchat.generation.reader import Reader
from lmchat.generation.state import State
from lmchat.store.records import Lease
from lmchat.store.turns import Timings, Turn, Usage
from lmchat.text.reply_parser import ReplyParser
from turbomind import Event, Stream, TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """New text of a reply. Joined, those of kind "text" equal the reply's text."""

    kind: Literal["text", "reasoning"]
    text: str


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that have KV: `done` of `total`."""

    done: int
    total: int


@dataclass(frozen=True)
class Reply:
    """A finished generation.

    Of a continued reply, text and token ids are whole; usage, timings and logprobs are those of the
    last call.

    Attributes:
        text: the text to show.
        reasoning: the model's reasoning before the text.
        token_ids: token ids of the reply, its stop token included.
        finish_reason: "stop", "length", "cancelled" or "error".
        usage: token counts.
        timings: durations, in seconds.
        error: the error of finish_reason "error"; a StoreError if the reply could not be stored.
        logprobs: one entry per new token, if requested.
        turn: the stored turn, which repeats the fields above.
        notices: sentences for the user about changes to earlier turns, such as the cost of a
            rewrite.
    """

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    error: Error | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    turn: Turn | None = field(default=None, repr=False)
    notices: tuple[str, ...] = ()


@dataclass
class Outcome:
    """The end of a generation. `token_ids` are those to store; `stopped` is True if the last of
    them is a stop token."""

    token_ids: list[int]
    finish_reason: str
    stopped: bool
    error: Error | None
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()


class Clock:
    """Times of one generation, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.called = time.perf_counter()
        self.prepared = self.called
        self.posted = self.called
        self.first = 0.0

    def timings(self, tokens: int, end: float) -> Timings:
        """Returns the durations for `tokens` tokens, the last of which came at `end`."""
        decode = end - self.first if self.first else 0.0
        return Timings(
            ttft=self.first - self.called if self.first else 0.0,
            tpot=decode / (tokens - 1) if tokens > 1 else 0.0,
            total=end - self.called,
            prepare=self.prepared - self.called,
            queued=max(0.0, self.posted - self.prepared),
        )


class Generation:
    """Takes the engine's events on the reader thread; any number of threads may wait for the reply.

    A generation ends on the reader thread only, which also makes all calls listed here.

    Args:
        later: posts a call to the reader thread.
        commit: turns the outcome into a Reply, before any waiter is woken.
        moved: called with each new state.
        withdraw: takes a waiting request out of the queue; returns whether it was there.
        reopen: sends a request again whose handle is gone; returns whether it did.
    """

    def __init__(
        self,
        later: Callable[[Callable[[], object]], None],
        commit: Callable[[Outcome], Reply],
        moved: Callable[[State], None],
        withdraw: Callable[[], bool],
        reopen: Callable[[], bool],
    ) -> None:
        self.clock = Clock()
        self._later = later
        self._commit = commit
        self._moved = moved
        self._withdraw = withdraw
        self._reopen = reopen
        self._changed = InterruptibleEvent()
        self._parts: deque[Delta | Progress] = deque()  # not yet read
        self._listeners: list[Callable[[], None]] = []
        self._cancelled = False
        self._done = False
        self._committed = False
        self._reply: Reply | None = None
        self._error: Error | None = None  # before the first token
        self._broken: Exception | None = None  # an error of this process; later events are ignored
        self._stream: Stream | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._parser: ReplyParser | None = None
        self._resumed = 0
        self._reasoned = 0
        self._rewritten = 0
        self.charge: Callable[[int, float], object] = lambda _tokens, _seconds: None
        """Called with the number of new tokens and their time."""
        self._priority: int | None = None  # in the engine, if it was changed
        self.lease: Lease | None = None
        """Lease under which its tokens are journalled; None: they are not."""
        self.sampled = 0
        """Tokens received, those after a stop string included."""
        self.prompt_done = 0
        """Prompt tokens whose computation was reported."""

    def prepare(self, parser: ReplyParser, resumed: int = 0, rewritten: int = 0) -> None:
        """Sets the parser once the prompt exists. It has read the `resumed` tokens of a continued
        reply."""
        self._parser = parser
        self._resumed = resumed
        self._reasoned = parser.reasoning_tokens
        self._rewritten = rewritten
        self.clock.prepared = time.perf_counter()

    # --- calls of the reader thread --------------------------------------------------------------

    def post(self, reader: Reader, make: Callable[[], Stream]) -> None:
        """Sends the request to the engine by calling `make`."""
        if self._stream is None:
            self.clock.posted = time.perf_counter()
            self._moved(State.PREFILL)
        reader.watch(make, self)

    def attach(self, stream: Stream) -> None:
        """Records the stream of the request."""
        self._stream = stream
        if self._priority is not None:
            stream.set_priority(self._priority)
        if self._cancelled:  # `cancel()` sets it before it looks for a stream
            stream.cancel()

    def journal(self, events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Returns the tokens that `feed()` will show, with the lease to journal them under."""
        if self.lease is None or self._done or self._broken is not None:
            return None
        if self._parser is None or self._parser.stopped:
            return None
        ids = [token for event in events for token in event.token_ids]
        return (self.lease, ids) if ids else None

    def refuse(self, error: Exception) -> None:
        """Records that the next tokens were not journalled. The reply ends before them."""
        self._broken = self._broken or error
        if self._stream is not None:
            self._stream.cancel()

    def feed(self, events: Sequence[Event]) -> None:
        """Takes the next events of the request."""
        for event in events:
            try:
                self._take(event)
            except Exception as error:  # any error must release the session
                self._broken = self._broken or error
                if event.terminal:
                    self.fail(self._broken, event)
                elif self._stream is not None:
                    self._stream.cancel()  # ends when the engine has released the handle

    def _take(self, event: Event) -> None:
        if self._done:
            return
        if self._broken is not None:
            self.sampled += len(event.token_ids)
            if event.terminal:
                self.fail(self._broken, event)
            return
        parts: list[Delta | Progress] = []
        if event.progress is not None:
            parts.append(Progress(*event.progress))
            self.prompt_done = event.progress[0]
        if event.token_ids:
            self.charge(len(event.token_ids), event.seconds)
            parts += self._take_tokens(event)
        if parts:
            self._publish(parts)
        if event.finish_reason is not None:
            self._finish(event)

    def _take_tokens(self, event: Event) -> list[Delta | Progress]:
        assert self._parser is not None
        assert self._stream is not None
        if not self._token_ids:
            self.clock.first = event.seconds
            self._moved(State.DECODE)
        self.sampled += len(event.token_ids)
        overrun = self._parser.stopped
        if overrun:
            return []
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs
        parts = self._parser.push(event.token_ids)
        if self._parser.stopped:
            self._stream.cancel()
        return [Delta(kind, text) for kind, text in parts]

    def _finish(self, event: Event) -> None:
        assert self._parser is not None
        reason, parser, ids = str(event.finish_reason), self._parser, self._token_ids
        if reason == "error" and not ids:
            if isinstance(event.error, NotFound) and self._reopen():
                return None
            return self.fail(event.error or InternalError("the request failed without a reason"))
        stopped = reason == "stop"
        self._publish([Delta(kind, text) for kind, text in parser.finish()])
        if parser.stopped:
            reason, stopped = "stop", False
            del ids[max(0, parser.stored_tokens - self._resumed) :]
        usage = self._usage(event)
        timings = self.clock.timings(len(ids), event.seconds)
        error = event.error if reason == "error" else None
        logprobs = tuple(self._logprobs[: len(ids)])
        self._end(Outcome(ids, reason, stopped, error, usage, timings, logprobs))
        return None

    def _usage(self, event: Event | None) -> Usage:
        """Returns token counts from the last event; without one the cached tokens are unknown."""
        parser = self._parser
        own = Usage(
            completion_tokens=len(self._token_ids),
            reasoning_tokens=parser.reasoning_tokens - self._reasoned if parser else 0,
            rewritten_tokens=self._rewritten,
        )
        if event is None:
            return own
        return replace(
            own,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.reused_tokens,
            loaded_tokens=event.loaded_tokens,
            foreign_tokens=event.foreign_tokens,
        )

    def cancelled_early(self) -> None:
        """Ends a request that was cancelled before it was sent to the engine."""
        timings = self.clock.timings(0, time.perf_counter())
        self._end(Outcome([], "cancelled", False, None, Usage(), timings))

    def _end(self, outcome: Outcome) -> None:
        if self._committed:
            return
        self._committed = True
        reply: Reply | None = None
        error: Error | None = None
        try:
            reply = self._commit(outcome)
        except Exception as caught:
            error = as_error(caught)
        self._wake(reply, error)

    def fail(self, error: BaseException, event: Event | None = None) -> None:
        """Ends with an error, and with `event` if the engine ended it. A reply that has tokens
        stores them; without tokens, waiting raises the error."""
        if self._token_ids:
            ids, usage = self._token_ids, self._usage(event)
            timings = self.clock.timings(len(ids), time.perf_counter())
            return self._end(Outcome(ids, "error", False, as_error(error), usage, timings))
        self._end(
            Outcome(
                [],
                "error",
                False,
                as_error(error),
                Usage(),
                self.clock.timings(0, time.perf_counter()),
            )
        )
        return None

    def _wake(self, reply: Reply | None, error: Error | None) -> None:
        self._reply, self._error = reply, error
        self._done = True
        self._notify()

    def _publish(self, parts: list[Delta | Progress]) -> None:
        if parts:
            self._parts.extend(parts)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        for listener in list(self._listeners):
            listener()

    # --- calls of any thread ---------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Returns whether the generation is committed or has failed."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """Returns whether a caller has asked it to stop."""
        return self._cancelled

    def set_priority(self, priority: int) -> None:
        """Changes the priority of the request in the engine. Never waits. Any thread."""
        self._priority = priority
        if self._stream is not None:
            self._stream.set_priority(priority)

    def cancel(self) -> None:
        """Requests that it stops. Never waits. Any thread or finalizer may call it, repeatedly."""
        self._cancelled = True
        if self._done:
            return
        if self._stream is not None:
            self._stream.cancel()
        else:
            self._later(self._cancel_waiting)

    def _cancel_waiting(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        elif self._withdraw():
            self.cancelled_early()

    def abort(self, error: BaseException) -> None:
        """Ends a generation whose start failed or was interrupted. Waits for the end."""
        self._cancelled = True
        self._later(functools.partial(self._abort, error))
        self.wait()

    def _abort(self, error: BaseException) -> None:
        if self._stream is not None:  # it had started: the tokens so far are stored
            self._stream.cancel()
        elif self._withdraw():
            self.cancelled_early()
        else:
            self.fail(error)

    def listen(self, listener: Callable[[], None]) -> None:
        """Registers a listener, called on any thread when there are new parts or the end."""
        self._listeners.append(listener)
        listener()

    def take_parts(self) -> list[Delta | Progress]:
        """Returns the parts since the last call, without waiting."""
        parts: list[Delta | Progress] = []
        with contextlib.suppress(IndexError):
            while True:
                parts.append(self._parts.popleft())
        return parts

    def wait_parts(self) -> list[Delta | Progress]:
        """Waits for parts and returns those since the last call. Returns an empty list at the
        end."""
        self._changed.wait_for(lambda: bool(self._parts) or self._done)
        return self.take_parts()

    def wait(self) -> None:
        """Waits for the end."""
        self._changed.wait_for(lambda: self._done)

    @property
    def reply(self) -> Reply | None:
        """The reply. None before the end, and if it failed before its first token."""
        return self._reply

    def result(self) -> Reply:
        """Returns the reply.

        Raises:
            Error: the generation failed before its first token.
        """
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply


class ReplyStream:
    """The text of a reply as it is generated: an iterator and context manager of str.

    Closing it (by `with`, `close()` or by dropping it) stops the generation; the tokens so far are
    stored.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pending: list[Delta | Progress] = []

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        return self._generation.reply

    def events(self) -> Iterator[Delta | Progress]:
        """Yields all parts: text, reasoning, and the progress of the prompt."""
        while (part := self._next()) is not None:
            yield part

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (part := self._next()) is not None:
            if isinstance(part, Delta) and part.kind == "text":
                return part.text
        raise StopIteration

    def _next(self) -> Delta | Progress | None:
        if not self._pending:
            self._pending = self._generation.wait_parts()[::-1]
        if self._pending:
            return self._pending.pop()
        self._generation.result()  # raises if the generation failed before its first token
        return None

    def result(self) -> Reply:
        """Waits for the end and returns the reply.

        Raises:
            Error: the generation failed before its first token.
        """
        try:
            self._generation.wait()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._generation.result()

    def stop(self) -> Reply | None:
        """Stops the generation, waits until the turn is committed, and returns the reply."""
        self.close()
        return self.reply

    def close(self) -> None:
        """Stops the generation and waits until the turn is committed. Idempotent."""
        self._generation.cancel()
        self._generation.wait()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        generation = getattr(self, "_generation", None)
        if generation is not None and not generation.done:
            generation.cancel()


def as_error(error: BaseException) -> Error:
    """Returns the error as one of `lmchat.errors`."""
    if isinstance(error, Error):
        return error
    found = InternalError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
