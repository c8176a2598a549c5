"""The text of a reply as it comes, for asyncio.

A generation starts in another thread: the turn's start goes to the disk. Its news wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from lmchat.errors import Error
from lmchat.generation.generation import Delta, Generation, Progress, Reply


class _News:
    """Wakes a task of this loop when a generation has something, from whichever thread."""

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
    """The text of a reply as it comes: an asynchronous iterator and context manager of str.

    Leaving it stops the generation; what came is kept. Read it on the loop that made it.
    """

    def __init__(self, start: Callable[[], Generation], ending: Generation | None = None) -> None:
        self._beginning = _Beginning(start)
        self._ending = ending
        self._pending: list[Delta | Progress] = []
        self._closed = False
        self._generation: Generation | None = None
        self._started: asyncio.Future[Generation | None] | None = None
        if ending is None:
            self._started = self._beginning.begin()

    async def _begun(self) -> Generation:
        if self._generation is None:
            if self._started is None:
                if self._ending is not None:
                    await end_of(self._ending)
                self._started = self._beginning.begin()
            try:
                await asyncio.wait({self._started})
            except asyncio.CancelledError:
                self._beginning.drop()
                await asyncio.wait({self._started})  # it is about to be, and then ends at once
                raise
            generation = self._started.result()
            assert generation is not None  # it was not dropped
            self._generation = generation
            self._news = _News(generation)
        return self._generation

    @property
    def reply(self) -> Reply | None:
        """The whole reply, once it has ended; None before."""
        return self._generation.reply if self._generation is not None else None

    async def events(self) -> AsyncIterator[Delta | Progress]:
        """Everything that comes: text, reasoning, and the progress of the prompt."""
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
            self._news.clear()
            ended = generation.done
            self._pending = generation.take_parts()[::-1]
            if self._pending:
                break
            if ended:
                generation.result()  # raises where nothing came of it
                return None
            await self._news.wait()
        return self._pending.pop()

    async def result(self) -> Reply:
        """Waits for the end without showing the text. Cancelling the wait stops the generation."""
        generation = await self._begun()
        try:
            await self._news.wait_for_end()
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation.result()

    async def stop(self) -> Reply | None:
        """Stops the generation and waits until the turn is committed."""
        await self.aclose()
        return self.reply

    async def aclose(self) -> None:
        """As `stop()`. Idempotent."""
        self._closed = True
        if self._started is not None and self._generation is None:
            with contextlib.suppress(Error):  # nobody asks how it failed
                await self._begun()
        if self._generation is not None:
            self._generation.cancel()
            await self._news.wait_for_end()

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
        beginning = getattr(self, "_beginning", None)
        if beginning is not None:
            beginning.drop()


class _Beginning:
    """Starts a generation in another thread: the turn's start goes to the disk."""

    def __init__(self, start: Callable[[], Generation]) -> None:
        self._start = start
        self._dropped = threading.Event()
        self._generation: Generation | None = None

    def begin(self) -> asyncio.Future[Generation | None]:
        """From now on; None comes when it was dropped before."""
        future = asyncio.get_running_loop().run_in_executor(None, self._run)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, if by nobody
        return future

    def drop(self) -> None:
        """Nobody reads it: it stops, now or when it has started. Any thread or finalizer."""
        self._dropped.set()  # first: `_run()` sees it, or has left its generation
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
    """Stops it and waits until it has ended."""
    generation.cancel()
    await _News(generation).wait_for_end()
