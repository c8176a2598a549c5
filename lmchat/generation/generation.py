"""One generation: the events of its request, the parts of its reply, and its end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from lmchat.errors import Error, InternalError, NotFound
from lmchat.forks import watch
from lmchat.generation.choice import Choice
from lmchat.generation.observer import Observer, report
from lmchat.generation.parts import Delta, Part, PartsLog, Progress
from lmchat.generation.reader import Reader
from lmchat.generation.reply import Outcome, Reply
from lmchat.generation.reply_stream import Follower, ReplyStream
from lmchat.generation.state import State
from lmchat.store.records import Lease
from lmchat.store.turns import Timings, Usage
from lmchat.text.replies.reply_parser import ReplyParser
from turbomind import Event, Stream

__all__ = [
    "Delta",
    "Generation",
    "Outcome",
    "Progress",
    "Reply",
    "ReplyStream",
    "as_error",
]


class Clock:
    """Times of one generation, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.called = time.perf_counter()
        self.prepared = self.called
        self.posted = self.called

    def timings(self, tokens: int, first: float, end: float) -> Timings:
        """Returns the durations for `tokens` tokens, which came from `first` (0.0: none did) to
        `end`."""
        decode = end - first if first else 0.0
        return Timings(
            ttft=first - self.called if first else 0.0,
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
        commit_later: posts the call of `commit` to a thread that may wait. Default: the reader
            thread calls it.
    """

    def __init__(
        self,
        later: Callable[[Callable[[], object]], None],
        commit: Callable[[Outcome], Reply],
        moved: Callable[[State], None],
        withdraw: Callable[[], bool],
        reopen: Callable[[], bool],
        commit_later: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> None:
        watch(self)
        self.clock = Clock()
        self._later = later
        self._commit = commit
        self._moved = moved
        self._withdraw = withdraw
        self._reopen = reopen
        self._commit_later = commit_later
        self.log = PartsLog()
        """The parts of the reply, and its end. It holds no reference to the generation."""
        self._parts: list[Part] = []  # not yet in the log
        self._cancelled = False
        self._committed = False
        self._broken: Exception | None = None  # an error of this process; later events are ignored
        self._stream: Stream | None = None
        self._choices: list[Choice] = []
        self._first: Event | None = None  # the last event of the first choice
        self._has_tokens = False
        self._rewritten = 0
        self.charge: Callable[[int, float], object] = lambda _tokens, _seconds: None
        """Called with the number of new tokens and their time."""
        self.choice_ended: Callable[[], object] = lambda: None
        """Called when a choice has ended before others."""
        self._priority: int | None = None  # in the engine, if it was changed
        self.lease: Lease | None = None
        """Lease under which its tokens are journalled; None: they are not."""
        self.has_request = False
        """Whether its turn answers a client's request that an equal one may take over."""
        self.observers: Sequence[Observer] = ()
        """Are told of tokens and of the end."""
        self.known_tokens: int | None = None
        """Tokens of the prompt that its session had before the turn; None: it is of no session."""
        self.has_moved = False
        """Whether another process had the session's lease before."""
        self.sampled = 0
        """Tokens received, those after a stop string included."""
        self.prompt_done = 0
        """Prompt tokens whose computation was reported."""

    def prepare(
        self,
        parser: ReplyParser,
        resumed: int = 0,
        rewritten: int = 0,
        *,
        others: Sequence[ReplyParser] = (),
        before: Sequence[Delta] = (),
    ) -> None:
        """Sets the parsers once the prompt exists.

        Args:
            parser: parser of the first choice. It has read the tokens of a continued reply.
            resumed: number of these. The other choices continue it too.
            rewritten: tokens of earlier turns that were replaced.
            others: parsers of the other choices.
            before: what a continued reply had before, for followers.
        """
        self._choices = [Choice(0, parser, resumed)]
        self._choices += [Choice(i, one, resumed) for i, one in enumerate(others, start=1)]
        self._rewritten = rewritten
        self.log.before = tuple(before)
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
        if self.lease is None or self.log.done or self._broken is not None:
            return None
        if not self._choices or self._choices[0].parser.stopped:
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
        self._publish()

    def _take(self, event: Event) -> None:
        if self.log.done:
            return
        if self._broken is not None:
            self.sampled += len(event.token_ids)
            if event.terminal:
                self.fail(self._broken, event)
            return
        if event.progress is not None:
            self._parts.append(Progress(*event.progress, event.reused_tokens))
            self.prompt_done = event.progress[0]
        if event.token_ids:
            self.charge(len(event.token_ids), event.seconds)
            self._take_tokens(event)
        if event.finish_reason is not None:
            self._finish(event)

    def _take_tokens(self, event: Event) -> None:
        if not self._has_tokens:
            self._has_tokens = True
            self._moved(State.DECODE)
        self.sampled += len(event.token_ids)
        choice = self._choices[event.choice]
        overrun = choice.parser.stopped
        if overrun:
            return
        if self.observers and choice.arrived:
            gap = event.seconds - choice.arrived
            report(self.observers, lambda observer: observer.tokens(gap))
        choice.arrived = event.seconds
        self._parts += choice.take(event)
        if choice.parser.stopped:
            assert self._stream is not None
            self._stream.cancel(choice.index if len(self._choices) > 1 else None)

    def _finish(self, event: Event) -> None:
        reason = str(event.finish_reason)
        if event.choice == 0:
            self._first = event
        if reason == "error" and not self._has_tokens:
            if not event.terminal or (isinstance(event.error, NotFound) and self._reopen()):
                return None
            return self.fail(event.error or InternalError("the request failed without a reason"))
        self._parts += self._choices[event.choice].finish(reason, event.seconds, event.error)
        if event.terminal:
            self._end(self._outcome(self._first))
        else:
            self.choice_ended()
        return None

    def _outcome(self, first: Event | None) -> Outcome:
        """Returns the ends of all choices; `first` counts the prompt."""
        found: list[Outcome] = []
        for choice in self._choices:
            timings = self.clock.timings(len(choice.token_ids), choice.first, choice.last)
            event, rewritten = (None, 0) if choice.index else (first, self._rewritten)
            found.append(choice.outcome(timings, event, rewritten))
        found[0].others = tuple(found[1:])
        return found[0]

    def cancelled_early(self) -> None:
        """Ends a request that was cancelled before it was sent to the engine."""
        self._end(self._empty("cancelled"))

    def _empty(self, reason: str, error: Error | None = None) -> Outcome:
        timings = self.clock.timings(0, 0.0, time.perf_counter())
        others = tuple(Outcome([], reason, False, error, Usage(), timings) for _ in self._choices)
        return Outcome([], reason, False, error, Usage(), timings, others=others[1:])

    def fail(self, error: BaseException, event: Event | None = None) -> None:
        """Ends with an error, and with `event` if the engine ended it. A reply that has tokens
        stores them; without tokens, waiting raises the error."""
        found = as_error(error)
        if not self._has_tokens:
            return self._end(self._empty("error", found))
        for choice in self._choices:
            if not choice.finish_reason:
                self._parts += choice.fail(found, time.perf_counter())
        return self._end(self._outcome(self._first or event))

    def _end(self, outcome: Outcome) -> None:
        if self._committed:
            return
        self._committed = True
        self._publish()
        self._commit_later(functools.partial(self._finish_with, outcome))

    def _finish_with(self, outcome: Outcome) -> None:
        """Commits the outcome and wakes the waiters. Only here the calling thread may wait."""
        reply: Reply | None = None
        error: Error | None = None
        try:
            reply = self._commit(outcome)
        except Exception as caught:
            error = as_error(caught)
        self._report_end(reply, error)
        self.log.end(reply, error)

    def _report_end(self, reply: Reply | None, error: Error | None) -> None:
        if reply is not None:
            ended, facts = reply, (self.known_tokens, self.has_moved)
            report(self.observers, lambda observer: observer.ended(ended, *facts))
        elif error is not None:
            failure = error
            report(self.observers, lambda observer: observer.failed(failure))

    def _publish(self) -> None:
        parts = self._parts
        if parts:
            self._parts = []
            self.log.append(parts)

    # --- calls of any thread ---------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Returns whether the generation is committed or has failed."""
        return self.log.done

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
        if self.log.done:
            return
        if self._stream is not None:
            self._stream.cancel()
        else:
            self._later(self._cancel_waiting)

    def cancel_again(self) -> None:
        """Repeats a `cancel()` that may have come before the request was in the queue."""
        if self._cancelled:
            self.cancel()

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

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that the reply becomes; None without a session, and before the start."""
        return self.log.turn_id

    def follow(self) -> Follower:
        """Returns a new reader of the reply, which gets all of it. Any number may read at once."""
        return Follower(self.log)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Registers a listener, called on any thread when there are new parts or the end, and once
        now. Returns a function that removes it, which any thread may call."""
        return self.log.listen(listener)

    def wait(self) -> None:
        """Waits for the end."""
        self.log.wait()

    @property
    def reply(self) -> Reply | None:
        """The reply. None before the end, and if it failed before its first token."""
        return self.log.reply

    def result(self) -> Reply:
        """Returns the reply, after the end.

        Raises:
            Error: the generation failed before its first token.
            InvalidRequest: it has not ended.
        """
        return self.log.result()


def as_error(error: BaseException) -> Error:
    """Returns the error as one of `lmchat.errors`."""
    if isinstance(error, Error):
        return error
    found = InternalError(f"{type(error).__name__}: {error}")
    found.__cause__ = error
    return found
