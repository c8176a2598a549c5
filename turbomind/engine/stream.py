"""Events of a request, streams of events (blocking and asyncio), and their sum."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn, TypeAlias

import turbomind._C as _C
from turbomind.closing import Closing
from turbomind.errors import Error, InternalError
from turbomind.params import integer, of_core, wrong

_CHOICES = 256  # most choices of a request
WAIT = 0.1  # seconds of one blocking wait; Python handles signals (Ctrl-C) between two waits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one generated token, under the logits before penalties and temperature.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        top: (token id, log-probability) of the k most likely tokens, the most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """The outcome of one step for one choice.

    Attributes:
        choice: Index of the choice, from 0.
        token_ids: New tokens.
        logprobs: One entry per token if the request asked for them, else empty.
        progress: (prompt tokens done, total) while the prompt is prefilled, else None.
        finish_reason: "stop", "length", "cancelled" or "error" in the last event of a choice, else
            None. The fields from `error` to `foreign_tokens` are set in that event only, but
            `reused_tokens` also where `progress` is.
        error: The exception of an "error".
        prompt_tokens: Length of the prompt, in tokens.
        reused_tokens: Prompt tokens that were not computed.
        loaded_tokens: Tokens of `reused_tokens` loaded from a lower tier for this request.
        foreign_tokens: Tokens of `reused_tokens` whose KV another build or machine has computed.
        terminal: Marks the last event of the request.
        seconds: Time at which the engine made the event, on the clock of `time.perf_counter`.
    """

    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    progress: tuple[int, int] | None = None
    finish_reason: str | None = None
    error: Error | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0
    loaded_tokens: int = 0
    foreign_tokens: int = 0
    terminal: bool = False
    seconds: float = 0.0


def _event(event: _C.Event) -> Event:
    logprobs = event.logprobs
    reason, progress = event.finish_reason, event.progress
    if reason is None and progress is None:  # one per token: only the fields that it has
        return Event(
            event.choice,
            tuple(event.token_ids),
            _logprobs(logprobs) if logprobs else (),
            seconds=event.seconds,
        )
    return Event(
        choice=event.choice,
        token_ids=tuple(event.token_ids),
        logprobs=_logprobs(logprobs),
        progress=progress,
        finish_reason=reason,
        error=event.error and of_core(event.error),
        prompt_tokens=event.prompt_tokens,
        reused_tokens=event.reused_tokens,
        loaded_tokens=event.loaded_tokens,
        foreign_tokens=event.foreign_tokens,
        terminal=event.terminal,
        seconds=event.seconds,
    )


def _logprobs(found: Iterable[_C.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(entry.logprob, tuple(entry.top)) for entry in found)


@dataclass
class Choice:
    """One finished choice.

    Attributes:
        token_ids: Generated tokens, a stop token included.
        logprobs: One entry per token if the request asked for them, else empty.
        finish_reason: "stop", "length" or "cancelled".
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Generation:
    """A finished request. The properties are those of the first choice.

    Attributes:
        choices: The choices, in order of their index.
        prompt_tokens: Length of the prompt, in tokens.
        reused_tokens: Prompt tokens that were not computed.
        seed: The seed that applied.
        loaded_tokens: Tokens of `reused_tokens` loaded from a lower tier for this request.
        foreign_tokens: Tokens of `reused_tokens` whose KV another build or machine has computed.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    reused_tokens: int
    seed: int
    loaded_tokens: int = 0
    foreign_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens, a stop token included."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities, one entry per token if the request asked for them."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "cancelled"."""
        return self.choices[0].finish_reason


def collect(events: Iterable[Event], seed: int = 0) -> Generation:
    """Sums up all events of a request; raises the error of an "error" finish."""
    choices: dict[int, Choice] = {}
    first = Event()  # the finish event of choice 0
    for event in events:
        choice = choices.setdefault(event.choice, Choice())
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        if event.finish_reason is None:
            continue
        if event.finish_reason == "error":
            raise event.error or InternalError("the request failed without an error of its own")
        choice.finish_reason = event.finish_reason
        # The first choice prefills the prompt for all choices.
        if event.choice == 0:
            first = event
    return Generation(
        tuple(choices[i] for i in sorted(choices)),
        first.prompt_tokens,
        first.reused_tokens,
        seed,
        first.loaded_tokens,
        first.foreign_tokens,
    )


class LoopWaker:
    """Wakes the readers of one asyncio loop through one file descriptor for all their requests."""

    def __init__(self) -> None:
        self.waker = _C.Waker()
        self._ready: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, request_id: int, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """Returns an event that is set whenever the request has new events. Loop thread only."""
        if self._loop is None:
            loop.add_reader(self.waker.fd, self._drain)
            self._loop = loop
        ready = self._ready[request_id] = asyncio.Event()
        return ready

    def remove(self, request_id: int) -> None:
        """Ends the wake-ups of a request that is finished or has no reader. Any thread."""
        self._ready.pop(request_id, None)
        loop = self._loop
        if loop is not None and not self._ready:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._stop_if_idle)

    def _drain(self) -> None:
        for request_id in self.waker.drain():
            ready = self._ready.get(request_id)
            if ready is not None:
                ready.set()

    def _stop_if_idle(self) -> None:
        if self._loop is not None and not self._ready:
            self._loop.remove_reader(self.waker.fd)
            self._loop = None


LoopReader: TypeAlias = tuple[LoopWaker, asyncio.AbstractEventLoop]  # a waker and its loop


class LoopWakers:
    """The wakers of an engine, one per running loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> LoopReader | None:
        """Returns the waker of the loop that runs in this thread, or None without one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        with self._lock:
            waker = self._wakers.get(loop)
            if waker is None:
                waker = self._wakers[loop] = LoopWaker()
        return waker, loop


class Stream(Closing):
    """The events of one request, to be read once: by `for`, `async for`, or `poll()`.

    Closing it (as a context manager, by `close()`, or by dropping it) cancels the request. Reading
    raises no error of the request: each choice ends with one finish event, which has the error.
    One thread or task reads; any may call `cancel()`.

    Attributes:
        seed: The seed that applies.
    """

    def __init__(
        self,
        request: _C.Request,
        seed: int,
        reader: LoopReader | None,
        owner: object,
    ) -> None:
        self._owner = owner  # a reference: dropping the owner would cancel the request
        self.seed = seed
        self.request = request
        self._pending: deque[Event] = deque()
        self._waker = reader[0] if reader else None
        self._loop = reader[1] if reader else None
        self._ready = reader[0].add(request.id, reader[1]) if reader else None

    @property
    def id(self) -> int:
        """Number that an `Inbox` reports for this stream; unique within an engine."""
        return self.request.id

    @property
    def done(self) -> bool:
        """True once every event has been read."""
        return not self._pending and self.request.done

    def poll(self) -> list[Event]:
        """Returns the events since the last call, without waiting. The last one is `terminal`."""
        self._fill()
        events = list(self._pending)
        self._pending.clear()
        if self.request.done:
            self._forget()
        return events

    def cancel(self, choice: int | None = None) -> None:
        """Cancels the request, or one choice of it; the finish events still follow. Any thread, any
        number of times.

        Args:
            choice: index of the choice; the others continue. None: all. Choices end when the prompt
                has been computed. An index that the request does not have is ignored.

        Raises:
            InvalidRequest: `choice` is not an integer from 0 to 255.
        """
        if choice is None:
            self.request.cancel()
        elif isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice < _CHOICES:
            self.request.cancel_choice(choice)
        else:
            raise wrong("choice", choice, f"an integer from 0 to {_CHOICES - 1}, or None")

    def set_priority(self, priority: int) -> None:
        """Changes the request's priority from the next step on. Any thread, any number of times.

        A running request loses its slot to a waiting one of a lower number, and continues later
        from the same token.

        Args:
            priority: An integer of 32 bits; lower is served first.

        Raises:
            InvalidRequest: `priority` is out of range.
        """
        self.request.set_priority(integer("priority", priority, -(2**31), 2**31 - 1))

    def close(self) -> None:
        """Cancels the request and waits until it has ended, which takes at most one step."""
        self.cancel()
        self._pending.clear()
        while not self.request.done:
            self.request.wait(WAIT)
            self.request.drain()
        self._forget()

    async def aclose(self) -> None:
        """Closes the stream as `close()` does, for asyncio."""
        self.cancel()
        async for _ in self:
            pass

    def result(self) -> Generation:
        """Waits for the end and returns the sum of the events; raises a failed request's error.

        Ctrl-C cancels the request.
        """
        try:
            return collect(self, self.seed)
        except KeyboardInterrupt:  # it may come between two events too
            self.cancel()
            raise

    async def aresult(self) -> Generation:
        """Returns the same as `result()`, for asyncio."""
        return collect([event async for event in self], self.seed)

    def _fill(self) -> None:
        self._pending.extend(_event(event) for event in self.request.drain())

    def _forget(self) -> None:
        if self._waker is not None:
            self._waker.remove(self.request.id)
            self._waker = None

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            while not self._pending:
                if self.request.done:
                    self._forget()
                    raise StopIteration
                self.request.wait(WAIT)
                self._fill()
        except KeyboardInterrupt:
            self.cancel()
            raise
        return self._pending.popleft()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            while not self._pending:
                if self.request.done:
                    self._forget()
                    raise StopAsyncIteration
                await self._wait_for_events()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._pending.popleft()

    async def _wait_for_events(self) -> None:
        if self._ready is None or asyncio.get_running_loop() is not self._loop:
            # The stream was opened outside this loop, so the loop's descriptor does not report it.
            await asyncio.to_thread(self.request.wait, WAIT)
            self._fill()
            return
        self._ready.clear()
        self._fill()
        if not self._pending and not self.request.done:
            await self._ready.wait()
            self._fill()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream cannot be copied or pickled: its events can be read once")

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_ready"):
            self.request.cancel()
            self._forget()
