"""The text of a reply as it is generated, for asyncio.

A generation starts in another thread, because its first record is written to disk. Its events wake
the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from lmchat.aio_threads import Threads, shared
from lmchat.errors import Error
from lmchat.generation.generation import Delta, Generation, Progress, Reply


class _WakeUp:
    """Wakes a task of the current loop when a generation has new parts or has ended. Any thread."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.clear, self.wait = self._event.clear, self._event.wait
        generation.listen(self._notify)

    async def wait_for_end(self) -> None:
        while not self._generation.done:
            self.clear()
            if not self._generation.done:
                await self.wait()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)


class AsyncReplyStream:
    """The text of a reply as it is generated: an asynchronous iterator and context manager of str.

    Leaving it stops the generation; the tokens so far are stored. It must be read on the loop that
    made it.
    """

    def __init__(
        self,
        start: Callable[[], Generation],
        ending: Generation | None = None,
        threads: Threads | None = None,
    ) -> None:
        self._starter = _Starter(start, threads or shared)
        self._ending = ending
        self._pending: list[Delta | Progress] = []
        self._closed = False
        self._generation: Generation | None = None
        self._started: asyncio.Future[Generation | None] | None = None
        if ending is None:
            self._started = self._starter.begin()

    async def _begun(self) -> Generation:
        if self._generation is None:
            if self._started is None:
                if self._ending is not None:
                    await end_of(self._ending)
                self._started = self._starter.begin()
            try:
                await asyncio.wait({self._started})
            except asyncio.CancelledError:
                self._starter.drop()
                await asyncio.wait({self._started})  # it starts, and then ends at once
                raise
            generation = self._started.result()
            assert generation is not None  # it was not dropped
            self._generation = generation
            self._wake_up = _WakeUp(generation)
        return self._generation

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        return self._generation.reply if self._generation is not None else None

    async def events(self) -> AsyncIterator[Delta | Progress]:
        """Yields all parts: text, reasoning, and the progress of the prompt."""
        while (part := await self._next()) is not None:
            yield part

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while (part := await self._next()) is not None:
            if isinstance(part, Delta) and part.kind == "text":
                return part.text
        raise StopAsyncIteration

    async def _next(self) -> Delta | Progress | None:
        if self._closed and self._generation is None:
            return None
        generation = await self._begun()
        while not self._pending:
            self._wake_up.clear()
            ended = generation.done
            self._pending = generation.take_parts()[::-1]
            if self._pending:
                break
            if ended:
                generation.result()  # raises if the generation failed before its first token
                return None
            await self._wake_up.wait()
        return self._pending.pop()

    async def result(self) -> Reply:
        """Waits for the end and returns the reply. Cancelling the wait stops the generation.

        Raises:
            Error: the generation failed before its first token.
        """
        generation = await self._begun()
        try:
            await self._wake_up.wait_for_end()
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation.result()

    async def stop(self) -> Reply | None:
        """Stops the generation, waits until the turn is committed, and returns the reply."""
        await self.aclose()
        return self.reply

    async def aclose(self) -> None:
        """Stops the generation and waits until the turn is committed. Idempotent."""
        self._closed = True
        if self._started is not None and self._generation is None:
            with contextlib.suppress(Error):  # the error of a closed stream is dropped
                await self._begun()
        if self._generation is not None:
            self._generation.cancel()
            await self._wake_up.wait_for_end()

    async def __aenter__(self) -> AsyncReplyStream:
        await self._begun()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        starter = getattr(self, "_starter", None)
        if starter is not None:
            starter.drop()


class _Starter:
    """Starts a generation in another thread, because its first record is written to disk."""

    def __init__(self, start: Callable[[], Generation], threads: Threads) -> None:
        self._start = start
        self._threads = threads
        self._dropped = threading.Event()
        self._generation: Generation | None = None

    def begin(self) -> asyncio.Future[Generation | None]:
        """Starts the generation. The future's result is None if `drop()` was called before."""
        future = self._threads.start(self._run)
        # Retrieves the error: asyncio logs those that are not.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        return future

    def drop(self) -> None:
        """Stops the generation, now or when it has started. Any thread or finalizer."""
        self._dropped.set()  # first: `_run()` sees it, or has set its generation
        generation = self._generation
        if generation is not None and not generation.done:
            generation.cancel()

    def _run(self) -> Generation | None:
        if self._dropped.is_set():
            return None
        self._generation = generation = self._start()
        if self._dropped.is_set():
            generation.cancel()
        return generation


async def end_of(generation: Generation) -> None:
    """Stops the generation and waits until it has ended."""
    generation.cancel()
    await _WakeUp(generation).wait_for_end()
