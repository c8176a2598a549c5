"""The session API for asyncio, with the names of the blocking one.

Nothing here blocks the loop's thread. Properties read what is in memory, in constant time and
without a lock. All else is awaited: calls that wait for the engine or the store, or that read all
turns, run in a thread of the engine's executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    overload,
)

from typing_extensions import Unpack

from lmchat.aio_stream import AsyncFollower, AsyncReplyStream, end_of
from lmchat.aio_threads import READY, Threads, shared
from lmchat.engine import ChatEngine
from lmchat.errors import EngineClosed
from lmchat.forks import watch
from lmchat.generation.admission import MAX_QUEUE, MAX_WAIT
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.scoring import Scoring
from lmchat.generation.settings import GenerationSettings, StatelessSettings
from lmchat.generation.state import State
from lmchat.generation.ticket import QueueStats
from lmchat.sessions.registry import IDLE_CLOSE, MAX_OPEN
from lmchat.sessions.session import Branch, Session
from lmchat.store.protocol import Store
from lmchat.store.turns import Turn
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from turbomind import Forecast, ModelInfo, Residence

__all__ = ["AsyncChatEngine", "AsyncReplyStream", "AsyncSession"]

Face = TypeVar("Face")
P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    verb: Callable[Concatenate[Face, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns a method of `sync` for asyncio, which runs in another thread because it may wait."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        threads: Threads = self._threads
        return await threads.run(verb, self.sync, *args, **kwargs)

    return call


class AsyncSession:
    """A `Session` for asyncio, made by `AsyncChatEngine.session()`. `sync` is the session
    itself."""

    def __init__(self, session: Session, threads: Threads | None = None) -> None:
        watch(self)
        self.sync = session
        self._threads = threads or shared

    id = property(lambda self: self.sync.id, doc="Id of the session, 32 hexadecimal digits.")
    name = property(lambda self: self.sync.name, doc="Name of the session.")
    owner = property(lambda self: self.sync.owner, doc="Owner of the session.")
    created = property(lambda self: self.sync.created, doc="Time of creation, in UTC.")
    revision = property(lambda self: self.sync.revision, doc="Rises with every stored change.")
    pinned = property(lambda self: self.sync.pinned, doc="Whether its pages are retained longer.")
    tags = property(lambda self: self.sync.tags, doc="Tags.")
    metadata = property(lambda self: self.sync.metadata, doc="Texts by key, a copy.")
    overflow = property(lambda self: self.sync.overflow, doc="Policy for a full context.")
    unanswered = property(
        lambda self: self.sync.unanswered,
        doc="Text of a turn whose process ended early.",
    )
    notices = property(
        lambda self: self.sync.notices, doc="Notices that the next reply will start with."
    )
    history = property(lambda self: self.sync.history, doc="Rule for earlier turns.")
    settings = property(lambda self: self.sync.settings, doc="Generation settings.")
    template_variables = property(
        lambda self: self.sync.template_variables, doc="Variables that the template gets."
    )

    @property
    def state(self) -> State:
        """Current activity."""
        return self.sync.state

    @property
    def length(self) -> int:
        """Length of the transcript, in tokens."""
        return self.sync.length

    async def title(self) -> str:
        """Returns its own title, else the start of the first message."""
        return await self._threads.run(lambda: self.sync.title)

    async def system(self) -> str | None:
        """Returns the system prompt, or None."""
        return await self._threads.run(lambda: self.sync.system)

    async def interrupted(self) -> bool:
        """Returns whether the process ended during the last reply."""
        return await self._threads.run(lambda: self.sync.interrupted)

    async def turns(self) -> tuple[Turn, ...]:
        """Returns the turns of the current conversation."""
        return await self._threads.run(lambda: self.sync.turns)

    async def dropped(self) -> tuple[Turn, ...]:
        """Returns what was dropped from the prompt, as `Session.dropped`."""
        return await self._threads.run(lambda: self.sync.dropped)

    async def replies(self) -> tuple[Turn, ...]:
        """Returns the replies of all branches, the oldest first."""
        return await self._threads.run(lambda: self.sync.replies)

    async def token_ids(self) -> list[int]:
        """Returns the transcript of the current conversation, as token ids."""
        return await self._threads.run(lambda: self.sync.token_ids)

    @overload
    async def send(
        self,
        text: str,
        *,
        stream: Literal[False] = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    async def send(
        self,
        text: str,
        *,
        stream: Literal[True],
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> AsyncReplyStream: ...
    @overload
    async def send(
        self,
        text: str,
        *,
        stream: bool,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | AsyncReplyStream: ...
    async def send(
        self,
        text: str,
        *,
        stream: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply | AsyncReplyStream:
        """Generates a reply, as `Session.send()`. Cancelling the await stops the generation and
        commits the tokens that it has produced."""
        await self._settle()
        start = functools.partial(
            self.sync.start_send, text, template_variables=template_variables, **settings
        )
        return await _answer(start, stream, self._threads)

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> AsyncReplyStream:
        """Generates a reply, as `Session.stream()`. The generation begins at the first `await`
        when an earlier one is still ending."""
        start = functools.partial(
            self.sync.start_send, text, template_variables=template_variables, **settings
        )
        return AsyncReplyStream(start, self.sync.ending, self._threads)

    @overload
    async def continue_(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    async def continue_(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> AsyncReplyStream: ...
    @overload
    async def continue_(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream: ...
    async def continue_(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream:
        """Extends the last reply in place, as `Session.continue_()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_continue(**settings), stream, self._threads)

    @overload
    async def retry(
        self, *, stream: Literal[False] = False, **settings: Unpack[GenerationSettings]
    ) -> Reply: ...
    @overload
    async def retry(
        self, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> AsyncReplyStream: ...
    @overload
    async def retry(
        self, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream: ...
    async def retry(
        self, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream:
        """Generates another reply to the last user turn, as `Session.retry()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_retry(**settings), stream, self._threads)

    @overload
    async def edit(
        self,
        turn: int,
        text: str,
        *,
        stream: Literal[False] = False,
        **settings: Unpack[GenerationSettings],
    ) -> Reply: ...
    @overload
    async def edit(
        self, turn: int, text: str, *, stream: Literal[True], **settings: Unpack[GenerationSettings]
    ) -> AsyncReplyStream: ...
    @overload
    async def edit(
        self, turn: int, text: str, *, stream: bool, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream: ...
    async def edit(
        self, turn: int, text: str, *, stream: bool = False, **settings: Unpack[GenerationSettings]
    ) -> Reply | AsyncReplyStream:
        """Generates a reply to `text` in place of a user turn, as `Session.edit()`."""
        await self._settle()
        return await _answer(
            lambda: self.sync.start_edit(turn, text, **settings), stream, self._threads
        )

    start_send = _in_thread(Session.start_send)
    start_retry = _in_thread(Session.start_retry)
    start_edit = _in_thread(Session.start_edit)
    start_continue = _in_thread(Session.start_continue)

    async def stop(self, turn: int | None = None) -> Reply | None:
        """Stops the current generation, or only that of `turn`, as `Session.stop()`."""
        generation = self.sync.running
        if generation is None:
            return await self._threads.run(functools.partial(self.sync.stop, turn))
        if turn not in (None, generation.turn_id):
            return None
        if generation.has_request:
            await self._threads.run(self.sync._settle_request, generation)
        await end_of(generation)
        return generation.reply

    async def follow(self, turn: int | None = None) -> AsyncFollower:
        """Returns a reader of the reply that is being generated, as `Session.follow()`."""
        return AsyncFollower(await self._threads.run(functools.partial(self.sync.follow, turn)))

    async def _settle(self) -> None:
        ending = self.sync.ending
        if ending is not None:
            await end_of(ending)

    async def undo(self) -> str:
        """Removes the last user turn from the conversation, as `Session.undo()`."""
        await self._settle()
        return await self._threads.run(self.sync.undo)

    async def branches(self, turn: int) -> list[Branch]:
        """Returns the branches at a user turn, as `Session.branches()`."""
        return await self._threads.run(self.sync.branches, turn)

    async def switch(self, turn: int, index: int) -> None:
        """Switches to another branch, as `Session.switch()`."""
        await self._settle()
        await self._threads.run(self.sync.switch, turn, index)

    async def fork(
        self,
        name: str | None = None,
        at: int | None = None,
        *,
        after: int | None = None,
        tags: Iterable[str] | None = None,
    ) -> AsyncSession:
        """Creates a session with the same conversation, as `Session.fork()`."""
        fork = functools.partial(self.sync.fork, name, at, after=after, tags=tags)
        return AsyncSession(await self._threads.run(fork), self._threads)

    append = _in_thread(Session.append)
    edit_reply = _in_thread(Session.edit_reply)
    conversation = _in_thread(Session.conversation)
    annotate = _in_thread(Session.annotate)
    count_tokens = _in_thread(Session.count_tokens)
    update = _in_thread(Session.update)
    set_system = _in_thread(Session.set_system)
    set = _in_thread(Session.set)
    set_variables = _in_thread(Session.set_variables)
    set_history = _in_thread(Session.set_history)
    set_title = _in_thread(Session.set_title)
    set_tags = _in_thread(Session.set_tags)
    set_metadata = _in_thread(Session.set_metadata)
    set_overflow = _in_thread(Session.set_overflow)
    refresh = _in_thread(Session.refresh)
    rename = _in_thread(Session.rename)
    pin = _in_thread(Session.pin)
    predicted_ttft = _in_thread(Session.predicted_ttft)
    export = _in_thread(Session.export)
    close = _in_thread(Session.close)
    delete = _in_thread(Session.delete)

    async def warm(self) -> None:
        """Starts to load the session's KV, as `Session.warm()`."""
        await self._threads.run(self.sync.warm)

    async def residence(self) -> Residence:
        """Returns where the KV of the transcript is, as `Session.residence`."""
        return await self._threads.run(lambda: self.sync.residence)

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
        **engine_options: Any,
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

    sessions = _in_thread(ChatEngine.sessions)
    count_sessions = _in_thread(ChatEngine.count_sessions)
    delete = _in_thread(ChatEngine.delete)
    stats = _in_thread(ChatEngine.stats)

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
        return await _answer(start, stream, self._threads)

    chat_token_ids = _in_thread(ChatEngine.chat_token_ids)

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


async def _answer(
    start: Callable[[], Generation], stream: bool, threads: Threads
) -> Reply | AsyncReplyStream:
    replies = AsyncReplyStream(start, threads=threads)
    return replies if stream else await replies.result()
