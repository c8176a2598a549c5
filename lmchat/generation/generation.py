"""One generation, from the call to its last token: what is asked, what comes, how it ends."""

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
    """Prompt tokens whose keys and values exist, of all."""

    done: int
    total: int


@dataclass(frozen=True)
class Reply:
    """A finished generation.

    `text` is what is to be shown, `reasoning` what the model thought before it. `token_ids` are the
    reply's, its stop token included. `finish_reason` is "stop", "length", "cancelled" or "error",
    with its `error` (a StoreError where the reply could not be kept). `logprobs` has one entry per
    new token, when asked for. `notices` tell what happened to the past, such as what a rewrite
    cost. Of a continued reply, text and ids are whole; usage, timings and logprobs are those of the
    last call.
    """

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    error: Error | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    turn: Turn | None = field(default=None, repr=False)  # it holds the same once more
    notices: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a generation ended. `token_ids` are those to keep; `stopped`: the last one is a stop
    token."""

    token_ids: list[int]
    finish_reason: str
    stopped: bool
    error: Error | None
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()


class Clock:
    """Moments of one generation, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.called = time.perf_counter()
        self.prepared = self.called
        self.posted = self.called
        self.first = 0.0

    def timings(self, tokens: int, end: float) -> Timings:
        """The sums, for `tokens` tokens, the last of which came at `end`."""
        decode = end - self.first if self.first else 0.0
        return Timings(
            ttft=self.first - self.called if self.first else 0.0,
            tpot=decode / (tokens - 1) if tokens > 1 else 0.0,
            total=end - self.called,
            prepare=self.prepared - self.called,
            queued=max(0.0, self.posted - self.prepared),
        )


class Generation:
    """Takes the engine's events on the reader thread; any number of threads may wait for them.

    Whoever makes it says what to do with the end: `commit` turns the outcome into a Reply, before
    anybody hears of it. `moved` hears of each new state. `withdraw` takes a request that still
    waits out of the queue and says whether it did. `reopen` says whether a request whose handle is
    gone was sent once more. All are called on the reader thread, by which alone a generation ends;
    `later` has it do something.
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
        self._broken: Exception | None = None  # of ours: what still comes is not looked at
        self._stream: Stream | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._parser: ReplyParser | None = None
        self._resumed = 0
        self._reasoned = 0
        self._rewritten = 0
        self.lease: Lease | None = None
        """Under which its tokens are journalled; None: they are not."""
        self.sampled = 0
        """Tokens that came, those behind a stop string included."""
        self.prompt_done = 0
        """Tokens of the prompt that were seen to be computed."""

    def prepare(self, parser: ReplyParser, resumed: int = 0, rewritten: int = 0) -> None:
        """The prompt is known. The parser has had the `resumed` tokens of a continued reply."""
        self._parser = parser
        self._resumed = resumed
        self._reasoned = parser.reasoning_tokens
        self._rewritten = rewritten
        self.clock.prepared = time.perf_counter()

    # --- the engine's side ---------------------------------------------------------------------

    def post(self, reader: Reader, make: Callable[[], Stream]) -> None:
        """Sends the request to the engine: `make` does."""
        if self._stream is None:
            self.clock.posted = time.perf_counter()
            self._moved(State.PREFILL)
        reader.watch(make, self)

    def attach(self, stream: Stream) -> None:
        """The engine has the request."""
        self._stream = stream
        if self._cancelled:  # `cancel()` sets it before it looks for a stream
            stream.cancel()

    def journal(self, events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Reader thread: the tokens that `feed()` will show."""
        if self.lease is None or self._done or self._broken is not None:
            return None
        if self._parser is None or self._parser.stopped:
            return None
        ids = [token for event in events for token in event.token_ids]
        return (self.lease, ids) if ids else None

    def refuse(self, error: Exception) -> None:
        """Reader thread: the next tokens were not kept. It ends with those before them."""
        self._broken = self._broken or error
        if self._stream is not None:
            self._stream.cancel()

    def feed(self, events: Sequence[Event]) -> None:
        """Reader thread: the next events of the request."""
        for event in events:
            try:
                self._take(event)
            except Exception as error:  # whatever it is, the session must come free
                self._broken = self._broken or error
                if event.terminal:
                    self.fail(self._broken, event)
                elif self._stream is not None:
                    self._stream.cancel()  # it ends when the engine is done with the handle

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
            parts += self._take_tokens(event)
        if parts:
            self._tell(parts)
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
        self._tell([Delta(kind, text) for kind, text in parser.finish()])
        if parser.stopped:
            reason, stopped = "stop", False
            del ids[max(0, parser.kept - self._resumed) :]
        usage = self._usage(event)
        timings = self.clock.timings(len(ids), event.seconds)
        error = event.error if reason == "error" else None
        logprobs = tuple(self._logprobs[: len(ids)])
        self._end(Outcome(ids, reason, stopped, error, usage, timings, logprobs))
        return None

    def _usage(self, event: Event | None) -> Usage:
        """What was used, by the last event; without one nobody knows what was cached."""
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
        """It ends before the engine has heard of it."""
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
        """Reader thread: it ends with an error, and with the `event` if the engine ended it. With
        tokens the reply keeps them; without, waiting raises."""
        if self._token_ids:
            kept, usage = self._token_ids, self._usage(event)
            timings = self.clock.timings(len(kept), time.perf_counter())
            return self._end(Outcome(kept, "error", False, as_error(error), usage, timings))
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
        self._ring()

    def _tell(self, parts: list[Delta | Progress]) -> None:
        if parts:
            self._parts.extend(parts)
            self._ring()

    def _ring(self) -> None:
        self._changed.set()
        for listener in list(self._listeners):
            listener()

    # --- the reader's side ---------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it is committed, or has failed."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._cancelled

    def cancel(self) -> None:
        """Asks it to stop; any thread or finalizer, any number of times, never waits."""
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
        """What was to start it has failed, or was interrupted. Waits until it has ended."""
        self._cancelled = True
        self._later(functools.partial(self._abort, error))
        self.wait()

    def _abort(self, error: BaseException) -> None:
        if self._stream is not None:  # it had started: what came is kept
            self._stream.cancel()
        elif self._withdraw():
            self.cancelled_early()
        else:
            self.fail(error)

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called, on any thread, when there are parts or the end."""
        self._listeners.append(listener)
        listener()

    def take_parts(self) -> list[Delta | Progress]:
        """What came since the last call; never waits."""
        parts: list[Delta | Progress] = []
        with contextlib.suppress(IndexError):
            while True:
                parts.append(self._parts.popleft())
        return parts

    def wait_parts(self) -> list[Delta | Progress]:
        """What came since the last call; waits for something. Empty: the end."""
        self._changed.wait_for(lambda: bool(self._parts) or self._done)
        return self.take_parts()

    def wait(self) -> None:
        """Until it has ended."""
        self._changed.wait_for(lambda: self._done)

    @property
    def reply(self) -> Reply | None:
        """None before the end, and of a generation that failed before its first token."""
        return self._reply

    def result(self) -> Reply:
        """The reply; raises the error of a generation that failed before its first token."""
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply


class ReplyStream:
    """The text of a reply as it comes: an iterator and context manager of str.

    Closing it (by `with`, `close()` or by dropping it) stops the generation; what came is kept.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._pending: list[Delta | Progress] = []

    @property
    def reply(self) -> Reply | None:
        """The whole reply, once it has ended; None before."""
        return self._generation.reply

    def events(self) -> Iterator[Delta | Progress]:
        """Everything that comes: text, reasoning, and the progress of the prompt."""
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
        self._generation.result()  # raises where nothing came of it
        return None

    def result(self) -> Reply:
        """Waits for the end without showing the text."""
        try:
            self._generation.wait()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._generation.result()

    def stop(self) -> Reply | None:
        """Stops the generation and waits until the turn is committed."""
        self.close()
        return self.reply

    def close(self) -> None:
        """As `stop()`. Idempotent."""
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
    """The error as one of the tree."""
    if isinstance(error, Error):
        return error
    found = InternalError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
