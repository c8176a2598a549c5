"""`AsyncChatEngine`: a chat engine for asyncio, with the names of the blocking one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import (
    Any,
    Literal,
    overload,
)

from typing_extensions import Unpack

from lmchat.aio.session import AsyncSession
from lmchat.aio.stream import AsyncReplyStream, answer
from lmchat.aio.threads import READY, Threads, in_thread
from lmchat.engine import ChatEngine
from lmchat.errors import EngineClosed
from lmchat.forks import watch
from lmchat.generation.admission import MAX_QUEUE, MAX_WAIT
from lmchat.generation.generation import Reply
from lmchat.generation.scoring import Scoring
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.ticket import QueueStats
from lmchat.sessions.registry import IDLE_CLOSE, MAX_OPEN
from lmchat.store.protocol import Store
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from turbomind import Forecast, ModelInfo, Residence
from turbomind.config.engine_options import ChatEngineOptions


class AsyncChatEngine:
    """A `ChatEngine` for asyncio, with the same options.

    `async with` or `await engine.start()` loads the model. `sync` is the engine itself, for threads
    beside the loop.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | Store = "disk",
        persist_pages: bool = True,
        disk_quota: int | str | None = "auto",
        max_queue: int = MAX_QUEUE,
        idle_close: float | None = IDLE_CLOSE,
        max_open_sessions: int = MAX_OPEN,
        max_wait: float = MAX_WAIT,
        **engine_options: Unpack[ChatEngineOptions],
    ) -> None:
        self._threads = Threads()
        self._make = lambda: ChatEngine(
            model,
            store=store,
            persist_pages=persist_pages,
            disk_quota=disk_quota,
            max_queue=max_queue,
            idle_close=idle_close,
            max_open_sessions=max_open_sessions,
            max_wait=max_wait,
            **engine_options,
        )
        self._engine: ChatEngine | None = None

    async def start(self) -> AsyncChatEngine:
        """Loads the model, unless it is loaded."""
        if self._engine is None:
            self._threads.start_threads(READY)
            self._engine = await self._threads.run(self._make)
            watch(self)
        return self

    @property
    def sync(self) -> ChatEngine:
        """The engine itself.

        Raises:
            EngineClosed: it has not been started.
        """
        if self._engine is None:
            raise EngineClosed("the engine is not started: use `async with` or `await start()`")
        return self._engine

    def check_capacity(self, owner: str = "local", *, live: bool = False) -> None:
        """Raises Overloaded at once if a request would be refused now, as
        `ChatEngine.check_capacity()`."""
        self.sync.check_capacity(owner, live=live)

    def queue_stats(self) -> QueueStats:
        """Returns the counters of the queue before the engine."""
        return self.sync.queue_stats()

    async def session(self, name: str | None = None, **options: Any) -> AsyncSession:
        """Opens a session or creates it, as `ChatEngine.session()`."""
        session = functools.partial(self.sync.session, name, **options)
        return AsyncSession(await self._threads.run(session), self._threads)

    async def session_by_id(self, session_id: str, *, owner: str = "local") -> AsyncSession:
        """Opens the owner's session of this id, as `ChatEngine.session_by_id()`."""
        found = await self._threads.run(self.sync.session_by_id, session_id, owner=owner)
        return AsyncSession(found, self._threads)

    async def residences(self, sessions: Iterable[AsyncSession]) -> list[Residence]:
        """Returns where the KV of many sessions is, as `ChatEngine.residences()`."""
        return await self._threads.run(self.sync.residences, [one.sync for one in sessions])

    async def predicted_ttfts(
        self, sessions: Iterable[AsyncSession], new_tokens: int = 32
    ) -> list[float]:
        """Returns the predicted times to first token of many sessions, as
        `ChatEngine.predicted_ttfts()`."""
        given = [one.sync for one in sessions]
        return await self._threads.run(self.sync.predicted_ttfts, given, new_tokens)

    async def forecasts(
        self, sessions: Iterable[AsyncSession], new_tokens: int = 32
    ) -> list[Forecast]:
        """Returns both of these, as `ChatEngine.forecasts()`."""
        given = [one.sync for one in sessions]
        return await self._threads.run(self.sync.forecasts, given, new_tokens)

    sessions = in_thread(ChatEngine.sessions)
    count_sessions = in_thread(ChatEngine.count_sessions)
    delete = in_thread(ChatEngine.delete)
    stats = in_thread(ChatEngine.stats)

    async def import_(
        self, path: str | os.PathLike[str], name: str | None = None, **options: Any
    ) -> AsyncSession:
        """Imports a session, as `ChatEngine.import_()`."""
        take = functools.partial(self.sync.import_, path, name, **options)
        return AsyncSession(await self._threads.run(take), self._threads)

    async def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Continues a text or token ids, as `ChatEngine.generate()`."""
        return await self.stream(prompt, owner=owner, **settings).result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[StatelessSettings],
    ) -> AsyncReplyStream:
        """Continues a prompt and returns its stream, as `ChatEngine.stream()`."""
        start = functools.partial(self.sync.start_generate, prompt, owner=owner, **settings)
        return AsyncReplyStream(start, threads=self._threads)

    @overload
    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: Literal[False] = False,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply: ...
    @overload
    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: Literal[True],
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> AsyncReplyStream: ...
    @overload
    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: bool,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply | AsyncReplyStream: ...
    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str = "local",
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply | AsyncReplyStream:
        """Generates a reply to messages, as `ChatEngine.chat()`. Cancelling the await stops the
        generation."""
        start = functools.partial(
            self.sync.start_chat,
            messages,
            owner=owner,
            template_variables=template_variables,
            continue_final_message=continue_final_message,
            **settings,
        )
        return await answer(start, stream, self._threads)

    chat_token_ids = in_thread(ChatEngine.chat_token_ids)

    async def score(self, prompt: str | Iterable[int], *, owner: str = "local") -> list[float]:
        """Returns log-probabilities, as `ChatEngine.score()`. Cancelling the await stops it."""
        start = functools.partial(self.sync.start_score, prompt, owner=owner)
        starting = self._threads.start(start)
        try:
            scoring = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_cancel_started)
            raise
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        scoring.listen(wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            scoring.cancel()
            raise
        return await self._threads.run(scoring.result)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.sync.tokenizer

    @property
    def template_info(self) -> TemplateInfo:
        """Kind of the model's chat template."""
        return self.sync.template_info

    @property
    def model(self) -> str:
        """Name of the model in lists of sessions."""
        return self.sync.model

    @property
    def info(self) -> ModelInfo:
        """Properties of the model."""
        return self.sync.info

    @property
    def max_context(self) -> int:
        """Largest length of a conversation, in tokens."""
        return self.sync.max_context

    async def close(self) -> None:
        """Stops all generations and ends the threads, as `ChatEngine.close()`. Idempotent."""
        if self._engine is not None and not self._threads.is_closed:
            await self._threads.run(self._engine.close)
            self._threads.close()

    async def __aenter__(self) -> AsyncChatEngine:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _cancel_started(starting: asyncio.Future[Scoring]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()
