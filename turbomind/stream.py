"""What a request reports: events, streams of them (blocking and asyncio), and their sum."""

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
from turbomind.errors import Error, InternalError

WAIT = 0.1  # seconds of one blocking wait; signals (Ctrl-C) are looked at between two


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the model's own logits, before penalties and temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One step's news of one choice.

    `token_ids` are new tokens; `logprobs` is empty or has one entry per token. `progress` is
    (prompt tokens done, total) while the prompt is prefilled. `finish_reason` is "stop", "length",
    "cancelled" or "error", once per choice; then `prompt_tokens` are filled and, of those,
    `reused_tokens` that were not computed, `loaded_tokens` of them that came up from a tier below
    for this request, and `foreign_tokens` that another build or machine has computed; `error` is
    the exception of an "error". `terminal` marks the last event of the request.
    `seconds` is when the engine had it, on the clock of `time.perf_counter`.
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
    return Event(
        choice=event.choice,
        token_ids=tuple(event.token_ids),
        logprobs=tuple(TokenLogprobs(t.logprob, tuple(t.top)) for t in event.logprobs),
        progress=event.progress,
        finish_reason=event.finish_reason,
        error=event.error,
        prompt_tokens=event.prompt_tokens,
        reused_tokens=event.reused_tokens,
        loaded_tokens=event.loaded_tokens,
        foreign_tokens=event.foreign_tokens,
        terminal=event.terminal,
        seconds=event.seconds,
    )


@dataclass
class Choice:
    """One finished answer."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Generation:
    """A finished request. `reused_tokens` of the `prompt_tokens` were not computed for it (of them
    `loaded_tokens` came from a tier below, and `foreign_tokens` were computed by another build or
    machine); `seed` is the one that was used. The properties are those of the first choice."""

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
        """One per token, when asked for."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "cancelled"."""
        return self.choices[0].finish_reason


def collect(events: Iterable[Event], seed: int = 0) -> Generation:
    """The sum of all events of a request; raises the error of an "error" finish."""
    choices: dict[int, Choice] = {}
    first = Event()  # its facts
    for event in events:
        choice = choices.setdefault(event.choice, Choice())
        choice.token_ids += event.token_ids
        choice.logprobs += event.logprobs
        if event.finish_reason is None:
            continue
        if event.finish_reason == "error":
            raise event.error or InternalError("the request failed without saying why")
        choice.finish_reason = event.finish_reason
        # The first choice prefills the prompt for all.
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


class LoopFace:
    """One asyncio loop's view of an engine: one file descriptor for all its requests."""

    def __init__(self) -> None:
        self.waker = _C.Waker()
        self._news: dict[int, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, request_id: int, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """Loop thread: from now on the event is set whenever the request has news."""
        if self._loop is None:
            loop.add_reader(self.waker.fd, self._drain)
            self._loop = loop
        news = self._news[request_id] = asyncio.Event()
        return news

    def remove(self, request_id: int) -> None:
        """Any thread: the request is finished or nobody reads it any more."""
        self._news.pop(request_id, None)
        loop = self._loop
        if loop is not None and not self._news:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._rest)

    def _drain(self) -> None:
        for request_id in self.waker.drain():
            news = self._news.get(request_id)
            if news is not None:
                news.set()

    def _rest(self) -> None:
        if self._loop is not None and not self._news:
            self._loop.remove_reader(self.waker.fd)
            self._loop = None


Face: TypeAlias = tuple[LoopFace, asyncio.AbstractEventLoop]  # and the loop it is of


class LoopFaces:
    """The faces of an engine, one per running loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faces: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopFace] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> Face | None:
        """The face of the loop that runs in this thread, if one does."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        with self._lock:
            face = self._faces.get(loop)
            if face is None:
                face = self._faces[loop] = LoopFace()
        return face, loop


class Stream:
    """The events of one request, to be read once: `for`, `async for`, or `poll()`.

    Closing it (as a context manager, by `close()`, or by dropping it) cancels the request. Errors
    do not raise here: each choice ends with one finish event, which carries the error.
    """

    def __init__(
        self,
        request: _C.Request,
        seed: int,
        face: Face | None,
        owner: object,
    ) -> None:
        self._owner = owner  # stays alive while its stream is read: dropping it would cancel
        self.seed = seed
        self.request = request
        self._pending: deque[Event] = deque()
        self._face = face[0] if face else None
        self._loop = face[1] if face else None
        self._news = face[0].add(request.id, face[1]) if face else None

    @property
    def id(self) -> int:
        """What an `Inbox` reports this stream by; unique within an engine."""
        return self.request.id

    @property
    def done(self) -> bool:
        """Whether every event has been read."""
        return not self._pending and self.request.done

    def poll(self) -> list[Event]:
        """The events since the last call, without waiting. The last one is `terminal`."""
        self._fill()
        events = list(self._pending)
        self._pending.clear()
        if self.request.done:
            self._forget()
        return events

    def cancel(self) -> None:
        """Asks the engine to stop; the finish events still come. Any thread, any time."""
        self.request.cancel()

    def close(self) -> None:
        """Cancels what still runs and waits (at most one step) until it has ended."""
        self.cancel()
        self._pending.clear()
        while not self.request.done:
            self.request.wait(WAIT)
            self.request.drain()
        self._forget()

    async def aclose(self) -> None:
        """As `close()`, for asyncio."""
        self.cancel()
        async for _ in self:
            pass

    def result(self) -> Generation:
        """Waits for the end and sums up; raises the error of a failed request."""
        return collect(self, self.seed)

    async def aresult(self) -> Generation:
        """As `result()`, for asyncio."""
        return collect([event async for event in self], self.seed)

    def _fill(self) -> None:
        self._pending.extend(_event(event) for event in self.request.drain())

    def _forget(self) -> None:
        if self._face is not None:
            self._face.remove(self.request.id)
            self._face = None

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
                await self._wait_for_news()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._pending.popleft()

    async def _wait_for_news(self) -> None:
        if self._news is None or asyncio.get_running_loop() is not self._loop:
            # Opened outside this loop, so its descriptor does not speak for this request.
            await asyncio.to_thread(self.request.wait, WAIT)
            self._fill()
            return
        self._news.clear()
        self._fill()
        if not self._pending and not self.request.done:
            await self._news.wait()
            self._fill()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream cannot be copied or pickled: it is read once")

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
        if hasattr(self, "_news"):
            self.request.cancel()
            self._forget()
