"""`AsyncChatEngine`: a chat engine for asyncio, with the names of the blocking one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from typing_extensions import Unpack

from lmchat.aio.session import AsyncSession, opening
from lmchat.aio.stream import AsyncReplyStream
from lmchat.aio.threads import READY, Threads, in_thread, same
from lmchat.engine import ChatEngine
from lmchat.errors import EngineClosed
from lmchat.forks import watch
from lmchat.generation.admission import MAX_QUEUE, MAX_WAIT
from lmchat.generation.generation import Reply
from lmchat.generation.observer import Observer
from lmchat.generation.scoring import Scoring
from lmchat.generation.settings import StatelessSettings
from lmchat.generation.state import State
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

    session = opening(ChatEngine.session)
    session_by_name = opening(ChatEngine.session_by_name)
    session_by_id = opening(ChatEngine.session_by_id)
    import_ = opening(ChatEngine.import_)
    sessions = in_thread(ChatEngine.sessions)
    count_sessions = in_thread(ChatEngine.count_sessions)
    delete = in_thread(ChatEngine.delete)

    start_chat = in_thread(ChatEngine.start_chat)
    start_generate = in_thread(ChatEngine.start_generate)
    start_score = in_thread(ChatEngine.start_score)
    chat_token_ids = in_thread(ChatEngine.chat_token_ids)
    stats = in_thread(ChatEngine.stats)
    profile = in_thread(ChatEngine.profile)

    tokenizer: Tokenizer = same(ChatEngine.tokenizer)
    template_info: TemplateInfo = same(ChatEngine.template_info)
    model_settings: dict[str, Any] = same(ChatEngine.model_settings)
    model: str = same(ChatEngine.model)
    info: ModelInfo = same(ChatEngine.info)
    device: str = same(ChatEngine.device)
    threads: int = same(ChatEngine.threads)
    max_context: int = same(ChatEngine.max_context)
    waiting: int = same(ChatEngine.waiting)

    def check_capacity(self, owner: str | None = None, *, live: bool = False) -> None:
        """Raises Overloaded at once if a request would be refused now, as
        `ChatEngine.check_capacity()`."""
        self.sync.check_capacity(owner, live=live)

    def queue_stats(self) -> QueueStats:
        """Returns the counters of the queue before the engine."""
        return self.sync.queue_stats()

    def session_states(self) -> dict[State, int]:
        """Returns the number of open sessions in each state."""
        return self.sync.session_states()

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Reports all generations to `observer`, as `ChatEngine.observe()`."""
        return self.sync.observe(observer)

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

    async def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Continues a text or token ids, as `ChatEngine.generate()`."""
        return await self.stream(prompt, owner=owner, **settings).result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str | None = None,
        **settings: Unpack[StatelessSettings],
    ) -> AsyncReplyStream:
        """Continues a prompt and returns its stream, as `ChatEngine.stream()`."""
        start = functools.partial(self.sync.start_generate, prompt, owner=owner, **settings)
        return AsyncReplyStream(start, threads=self._threads)

    async def chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> Reply:
        """Generates a reply to messages, as `ChatEngine.chat()`. Cancelling the await stops the
        generation."""
        return await self.stream_chat(
            messages,
            owner=owner,
            template_variables=template_variables,
            continue_final_message=continue_final_message,
            **settings,
        ).result()

    def stream_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        owner: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **settings: Unpack[StatelessSettings],
    ) -> AsyncReplyStream:
        """Generates a reply to messages, as `ChatEngine.stream_chat()`."""
        start = functools.partial(
            self.sync.start_chat,
            messages,
            owner=owner,
            template_variables=template_variables,
            continue_final_message=continue_final_message,
            **settings,
        )
        return AsyncReplyStream(start, threads=self._threads)

    async def score(self, prompt: str | Iterable[int], *, owner: str | None = None) -> list[float]:
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
