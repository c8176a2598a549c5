"""The text of a reply as it is generated, for asyncio.

A generation starts in another thread, because its first record is written to disk. Its events wake
the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from lmchat.aio.threads import Threads, shared
from lmchat.errors import Error, InvalidRequest
from lmchat.forks import watch
from lmchat.generation.generation import Generation
from lmchat.generation.parts import Cursor, Delta, Progress
from lmchat.generation.reader import after_read
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.store.turns import Turn


class _LoopCalls:
    """Sets events of one loop from other threads.

    A call of the loop is a system call, in which the caller also loses the interpreter to the loop.
    So the reader thread makes one for all the events of a step, when it has passed on the step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: deque[asyncio.Event] = deque()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop; None: it is gone."""
        return self._loop()

    def set(self, event: asyncio.Event) -> None:
        """Sets an event soon. Any thread."""
        self._due.append(event)
        after_read(self._call)

    def _call(self) -> None:
        loop = self._loop()
        if self._due and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        while self._due:
            self._due.popleft().set()


_calls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls] = (
    weakref.WeakKeyDictionary()
)
_calls_lock = threading.Lock()


def _calls_of(loop: asyncio.AbstractEventLoop) -> _LoopCalls:
    with _calls_lock:
        found = _calls.get(loop)
        if found is None:
            found = _calls[loop] = _LoopCalls(loop)
        return found


def check_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raises InvalidRequest unless the running loop is this one."""
    if asyncio.get_running_loop() is not loop:
        raise InvalidRequest(
            "the reply is read in another event loop, expected the one in which its stream was "
            "made; AsyncSession.follow() makes another reader of a running reply"
        )


class _WakeUp:
    """Wakes a task of the current loop after a change that `listen` reports on any thread.

    The loop is called only while the task waits, since each call costs the reporting thread a
    system call.
    """

    def __init__(self, listen: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        self._calls = _calls_of(asyncio.get_running_loop())
        self._event = asyncio.Event()
        self._is_waiting = False
        self.remove = listen(self._notify)
        """Ends the wake-ups. Any thread or finalizer, repeatedly."""

    def check_loop(self) -> None:
        """Raises InvalidRequest in another loop than that of the reader."""
        check_loop(self._calls.loop)

    async def wait_for(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()`, which a change has made True, returns True.

        Raises:
            InvalidRequest: this is another loop than that of the reader.
        """
        self.check_loop()
        while not ready():
            self._event.clear()
            self._is_waiting = True  # before the check: a change after it wakes the task
            if ready():
                return
            await self._event.wait()

    def _notify(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._calls.set(self._event)


class _AsyncParts:
    """Iterates over the parts of a reply and over the text in them."""

    async def events(self) -> AsyncIterator[Delta | Progress]:
        """Yields all parts: text, reasoning, and the progress of the prompt."""
        while (part := await self._next()) is not None:
            yield part

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while (part := await self._next()) is not None:
            if isinstance(part, Delta) and part.kind == "text" and part.text and not part.choice:
                return part.text
        raise StopAsyncIteration

    async def _next(self) -> Delta | Progress | None:
        raise NotImplementedError


class AsyncReplyStream(_AsyncParts):
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
        watch(self)
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
            check_loop(self._started.get_loop())
            try:
                await asyncio.wait({self._started})
            except asyncio.CancelledError:
                self._starter.drop()
                await asyncio.wait({self._started})  # it starts, and then ends at once
                raise
            generation = self._started.result()
            assert generation is not None  # it was not dropped
            self._generation = generation
            self._cursor = Cursor(generation.log, whole=False)
            self._wake_up = _WakeUp(generation.listen)
        self._wake_up.check_loop()
        return self._generation

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        return self._generation.reply if self._generation is not None else None

    async def _next(self) -> Delta | Progress | None:
        if self._closed and self._generation is None:
            return None
        generation = await self._begun()
        if not self._pending:
            await self._wake_up.wait_for(lambda: self._cursor.has_parts or generation.done)
            self._pending = self._cursor.take()[::-1]
        if self._pending:
            return self._pending.pop()
        generation.result()  # raises if the generation failed before its first token
        return None

    async def take(self) -> list[Delta | Progress]:
        """Waits for parts and returns all that there are. Returns an empty list at the end.

        Raises:
            Error: the generation failed before its first token.
        """
        if self._closed and self._generation is None:
            return []
        generation = await self._begun()
        pending, self._pending = self._pending[::-1], []
        if not pending:
            await self._wake_up.wait_for(lambda: self._cursor.has_parts or generation.done)
        pending += self._cursor.take()
        if not pending:
            generation.result()  # raises if the generation failed before its first token
        return pending

    async def result(self) -> Reply:
        """Waits for the end and returns the reply. Cancelling the wait stops the generation.

        Raises:
            Error: the generation failed before its first token.
        """
        generation = await self._begun()
        try:
            await self._wake_up.wait_for(lambda: generation.done)
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
        generation = self._generation
        if generation is not None:
            generation.cancel()
            await self._wake_up.wait_for(lambda: generation.done)

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


class AsyncFollower(_AsyncParts):
    """A `Follower` for asyncio: an asynchronous iterator and context manager of str.

    Leaving it leaves the generation alone. One task of the loop that made it reads it; any thread
    may close it, which ends a wait of the task.

    Args:
        follower: the reader of the reply, as `Generation.follow()` returns it. It is read and
            closed by this object.
    """

    def __init__(self, follower: Follower) -> None:
        watch(self)
        self._follower = follower
        self._pending: list[Delta | Progress] = []
        self._wake_up = _WakeUp(follower.listen)

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        return self._follower.reply

    @property
    def done(self) -> bool:
        """Whether the reply has ended. Parts may still be unread."""
        return self._follower.done

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that the reply is or becomes; None without a session."""
        return self._follower.turn_id

    @property
    def before(self) -> int:
        """Number of the first parts that a continued reply had before."""
        return self._follower.before

    @property
    def preceding(self) -> tuple[Turn, ...]:
        """The turns before a running reply, as `Follower.preceding`."""
        return self._follower.preceding

    @property
    def dropped(self) -> tuple[Turn, ...]:
        """What was dropped before them, as `Follower.dropped`. Reads the store."""
        return self._follower.dropped

    async def _next(self) -> Delta | Progress | None:
        follower = self._follower
        self._wake_up.check_loop()
        if not self._pending:
            await self._wake_up.wait_for(lambda: follower.is_ready)
            self._pending = follower.take()[::-1]
        if follower.closed:
            return None
        if self._pending:
            return self._pending.pop()
        follower.result()  # raises if the generation failed before its first token
        return None

    async def take(self) -> list[Delta | Progress]:
        """Waits for parts and returns all that there are. Returns an empty list at the end."""
        if not self._pending:
            await self._wake_up.wait_for(lambda: self._follower.is_ready)
        pending, self._pending = self._pending[::-1], []
        return [*pending, *self._follower.take()]

    async def result(self) -> Reply:
        """Waits for the end and returns the reply. Cancelling the wait leaves the generation alone.

        Raises:
            InvalidRequest: the follower was closed before the end.
            Error: the generation failed before its first token.
        """
        follower = self._follower
        await self._wake_up.wait_for(lambda: follower.done or follower.closed)
        return follower.result()

    def close(self) -> None:
        """Detaches from the reply. Any thread may call it, repeatedly."""
        self._follower.close()
        self._wake_up.remove()

    async def aclose(self) -> None:
        """Detaches from the reply, as `close()`."""
        self.close()

    async def __aenter__(self) -> AsyncFollower:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        wake_up = getattr(self, "_wake_up", None)
        if wake_up is not None:
            wake_up.remove()


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
    wake_up = _WakeUp(generation.listen)
    try:
        await wake_up.wait_for(lambda: generation.done)
    finally:
        wake_up.remove()
