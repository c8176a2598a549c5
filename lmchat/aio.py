"""The session API for asyncio: the same sessions, the same names.

Nothing here waits in the loop's thread. What the engine's thread has to answer (a step can take
some hundred milliseconds) is asked in another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from lmchat.engine import MAX_QUEUE, ChatEngine, SessionInfo
from lmchat.errors import EngineClosed, Error
from lmchat.generation import Delta, Generation, Progress, Reply
from lmchat.session import Branch, Session
from lmchat.state import State
from lmchat.store import Store
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from lmchat.turns import Turn
from turbomind import ModelInfo, Stats

if TYPE_CHECKING:
    from lmchat.archive import Exported
    from turbomind import Residence


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
                    await _end_of(self._ending)
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


class AsyncSession:
    """A `Session` for asyncio. From `AsyncChatEngine.session()`; `sync` is the session itself."""

    def __init__(self, session: Session) -> None:
        self.sync = session

    name = property(lambda self: self.sync.name, doc="Its name.")
    owner = property(lambda self: self.sync.owner, doc="Whose it is.")
    title = property(lambda self: self.sync.title, doc="The beginning of the first message.")
    pinned = property(lambda self: self.sync.pinned, doc="Whether its pages stay before others'.")
    tags = property(lambda self: self.sync.tags, doc="Its tags.")
    overflow = property(lambda self: self.sync.overflow, doc="What it does with a full context.")
    interrupted = property(
        lambda self: self.sync.interrupted, doc="Whether its process ended in the last reply."
    )
    unanswered = property(
        lambda self: self.sync.unanswered, doc="A question whose process ended before the reply."
    )
    system = property(lambda self: self.sync.system, doc="The system prompt.")
    history = property(lambda self: self.sync.history, doc="The rule for earlier turns.")
    settings = property(lambda self: self.sync.settings, doc="Its generation settings.")
    template_variables = property(
        lambda self: self.sync.template_variables, doc="What the template gets besides."
    )

    @property
    def state(self) -> State:
        """What it is doing."""
        return self.sync.state

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The current conversation."""
        return self.sync.turns

    @property
    def token_ids(self) -> list[int]:
        """The transcript."""
        return self.sync.token_ids

    @property
    def length(self) -> int:
        """Tokens of the transcript."""
        return self.sync.length

    @overload
    async def send(
        self, text: str, *, stream: Literal[False] = False, **settings: Any
    ) -> Reply: ...
    @overload
    async def send(
        self, text: str, *, stream: Literal[True], **settings: Any
    ) -> AsyncReplyStream: ...
    @overload
    async def send(
        self, text: str, *, stream: bool, **settings: Any
    ) -> Reply | AsyncReplyStream: ...
    async def send(
        self, text: str, *, stream: bool = False, **settings: Any
    ) -> Reply | AsyncReplyStream:
        """As `Session.send()`. Cancelling the wait stops the generation and keeps what came."""
        await self._settle()
        return await _answer(lambda: self.sync.start_send(text, **settings), stream)

    def stream(self, text: str, **settings: Any) -> AsyncReplyStream:
        """As `Session.stream()`. Begins at the first `await` when a dropped one is still ending."""
        start = functools.partial(self.sync.start_send, text, **settings)
        return AsyncReplyStream(start, self.sync.ending)

    @overload
    async def continue_(self, *, stream: Literal[False] = False, **settings: Any) -> Reply: ...
    @overload
    async def continue_(self, *, stream: Literal[True], **settings: Any) -> AsyncReplyStream: ...
    @overload
    async def continue_(self, *, stream: bool, **settings: Any) -> Reply | AsyncReplyStream: ...
    async def continue_(self, *, stream: bool = False, **settings: Any) -> Reply | AsyncReplyStream:
        """As `Session.continue_()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_continue(**settings), stream)

    @overload
    async def retry(self, *, stream: Literal[False] = False, **settings: Any) -> Reply: ...
    @overload
    async def retry(self, *, stream: Literal[True], **settings: Any) -> AsyncReplyStream: ...
    @overload
    async def retry(self, *, stream: bool, **settings: Any) -> Reply | AsyncReplyStream: ...
    async def retry(self, *, stream: bool = False, **settings: Any) -> Reply | AsyncReplyStream:
        """As `Session.retry()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_retry(**settings), stream)

    @overload
    async def edit(
        self, turn: int, text: str, *, stream: Literal[False] = False, **settings: Any
    ) -> Reply: ...
    @overload
    async def edit(
        self, turn: int, text: str, *, stream: Literal[True], **settings: Any
    ) -> AsyncReplyStream: ...
    @overload
    async def edit(
        self, turn: int, text: str, *, stream: bool, **settings: Any
    ) -> Reply | AsyncReplyStream: ...
    async def edit(
        self, turn: int, text: str, *, stream: bool = False, **settings: Any
    ) -> Reply | AsyncReplyStream:
        """As `Session.edit()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_edit(turn, text, **settings), stream)

    async def stop(self) -> Reply | None:
        """As `Session.stop()`."""
        generation = self.sync.running
        if generation is None:
            return None
        await _end_of(generation)
        return generation.reply

    async def _settle(self) -> None:
        ending = self.sync.ending
        if ending is not None:
            await _end_of(ending)

    async def undo(self) -> str:
        """As `Session.undo()`."""
        await self._settle()
        return await asyncio.to_thread(self.sync.undo)

    def branches(self, turn: int) -> list[Branch]:
        """As `Session.branches()`."""
        return self.sync.branches(turn)

    async def switch(self, turn: int, index: int) -> None:
        """As `Session.switch()`."""
        await self._settle()
        await asyncio.to_thread(self.sync.switch, turn, index)

    async def fork(self, name: str | None = None, at: int | None = None) -> AsyncSession:
        """As `Session.fork()`."""
        return AsyncSession(await asyncio.to_thread(self.sync.fork, name, at))

    async def set_system(self, text: str | None) -> None:
        """As `Session.set_system()`."""
        await asyncio.to_thread(self.sync.set_system, text)

    async def set(self, **settings: Any) -> None:
        """As `Session.set()`."""
        await asyncio.to_thread(functools.partial(self.sync.set, **settings))

    async def set_variables(self, **variables: Any) -> None:
        """As `Session.set_variables()`."""
        await asyncio.to_thread(functools.partial(self.sync.set_variables, **variables))

    async def set_history(self, history: str) -> None:
        """As `Session.set_history()`."""
        await asyncio.to_thread(self.sync.set_history, history)

    async def warm(self) -> None:
        """As `Session.warm()`."""
        self.sync.warm()

    async def residence(self) -> Residence:
        """As `Session.residence`."""
        return await asyncio.to_thread(lambda: self.sync.residence)

    async def predicted_ttft(self, new_tokens: int = 32) -> float:
        """As `Session.predicted_ttft()`."""
        return await asyncio.to_thread(self.sync.predicted_ttft, new_tokens)

    async def export(
        self, path: str | os.PathLike[str], pages: bool = False, **options: Any
    ) -> Exported:
        """As `Session.export()`."""
        return await asyncio.to_thread(functools.partial(self.sync.export, path, pages, **options))

    async def set_title(self, title: str) -> None:
        """As `Session.set_title()`."""
        await asyncio.to_thread(self.sync.set_title, title)

    async def set_tags(self, tags: Iterable[str]) -> None:
        """As `Session.set_tags()`."""
        await asyncio.to_thread(self.sync.set_tags, tags)

    async def set_overflow(self, overflow: str) -> None:
        """As `Session.set_overflow()`."""
        await asyncio.to_thread(self.sync.set_overflow, overflow)

    async def refresh(self) -> None:
        """As `Session.refresh()`."""
        await asyncio.to_thread(self.sync.refresh)

    async def rename(self, name: str) -> None:
        """As `Session.rename()`."""
        await asyncio.to_thread(self.sync.rename, name)

    async def pin(self, pinned: bool = True) -> None:
        """As `Session.pin()`."""
        await asyncio.to_thread(self.sync.pin, pinned)

    async def close(self) -> None:
        """As `Session.close()`."""
        await asyncio.to_thread(self.sync.close)

    async def delete(self) -> None:
        """As `Session.delete()`."""
        await asyncio.to_thread(self.sync.delete)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.sync)[1:]}"


class AsyncChatEngine:
    """A `ChatEngine` for asyncio, with the same options.

    The model is loaded by `async with` or `await engine.start()`; `sync` is the engine itself, for
    threads beside the loop.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | Store = "disk",
        keep_pages: bool = True,
        disk_quota: int | str | None = None,
        max_queue: int = MAX_QUEUE,
        **engine_options: Any,
    ) -> None:
        self._make = lambda: ChatEngine(
            model,
            store=store,
            keep_pages=keep_pages,
            disk_quota=disk_quota,
            max_queue=max_queue,
            **engine_options,
        )
        self._engine: ChatEngine | None = None

    async def start(self) -> AsyncChatEngine:
        """Loads the model, unless it is loaded."""
        if self._engine is None:
            self._engine = await asyncio.to_thread(self._make)
        return self

    @property
    def sync(self) -> ChatEngine:
        """The engine; EngineClosed before it is started."""
        if self._engine is None:
            raise EngineClosed("the engine is not started: use `async with` or `await start()`")
        return self._engine

    async def session(self, name: str | None = None, **options: Any) -> AsyncSession:
        """As `ChatEngine.session()`."""
        session = functools.partial(self.sync.session, name, **options)
        return AsyncSession(await asyncio.to_thread(session))

    async def sessions(self, owner: str | None = None, **options: Any) -> list[SessionInfo]:
        """As `ChatEngine.sessions()`."""
        sessions = functools.partial(self.sync.sessions, owner, **options)
        return await asyncio.to_thread(sessions)

    async def import_(
        self, path: str | os.PathLike[str], name: str | None = None, **options: Any
    ) -> AsyncSession:
        """As `ChatEngine.import_()`."""
        take = functools.partial(self.sync.import_, path, name, **options)
        return AsyncSession(await asyncio.to_thread(take))

    async def delete(self, name: str, owner: str = "local") -> None:
        """As `ChatEngine.delete()`."""
        await asyncio.to_thread(self.sync.delete, name, owner)

    async def generate(
        self, prompt: str | Iterable[int], *, owner: str = "local", **settings: Any
    ) -> Reply:
        """As `ChatEngine.generate()`."""
        return await self.stream(prompt, owner=owner, **settings).result()

    def stream(
        self, prompt: str | Iterable[int], *, owner: str = "local", **settings: Any
    ) -> AsyncReplyStream:
        """As `ChatEngine.stream()`."""
        return AsyncReplyStream(lambda: self.sync.start_generate(prompt, owner=owner, **settings))

    async def score(self, prompt: str | Iterable[int]) -> list[float]:
        """As `ChatEngine.score()`."""
        return await asyncio.to_thread(self.sync.score, prompt)

    async def stats(self) -> Stats:
        """As `ChatEngine.stats()`."""
        return await asyncio.to_thread(self.sync.stats)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.sync.tokenizer

    @property
    def template_info(self) -> TemplateInfo:
        """What kind of chat template the model has."""
        return self.sync.template_info

    @property
    def model(self) -> str:
        """As `ChatEngine.model`."""
        return self.sync.model

    @property
    def info(self) -> ModelInfo:
        """The model."""
        return self.sync.info

    @property
    def max_context(self) -> int:
        """Tokens one conversation can have."""
        return self.sync.max_context

    async def close(self) -> None:
        """As `ChatEngine.close()`."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> AsyncChatEngine:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def _end_of(generation: Generation) -> None:
    generation.cancel()
    await _News(generation).wait_for_end()


async def _answer(start: Callable[[], Generation], stream: bool) -> Reply | AsyncReplyStream:
    replies = AsyncReplyStream(start)
    return replies if stream else await replies.result()
