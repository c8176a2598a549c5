"""The session API for asyncio: the same sessions, the same names.

Nothing here waits in the loop's thread. What the engine's thread has to answer (a step can take
some hundred milliseconds) is asked in another one.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    overload,
)

from lmchat.aio_stream import AsyncReplyStream, end_of
from lmchat.engine import MAX_QUEUE, ChatEngine
from lmchat.errors import EngineClosed
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.sessions.session import Branch, Session
from lmchat.store.protocol import Store
from lmchat.store.turns import Turn
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer
from turbomind import ModelInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from turbomind import Residence

__all__ = ["AsyncChatEngine", "AsyncReplyStream", "AsyncSession"]

Face = TypeVar("Face")
P = ParamSpec("P")
R = TypeVar("R")


def _in_thread(
    verb: Callable[Concatenate[Face, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A method of `sync` for asyncio: it may wait, and does so in another thread."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(verb, self.sync, *args, **kwargs)

    return call


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
    notices = property(
        lambda self: self.sync.notices, doc="What the next reply's notices will begin with."
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
        return await _answer(start, stream)

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
        return AsyncReplyStream(start, self.sync.ending)

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
        """As `Session.continue_()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_continue(**settings), stream)

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
        """As `Session.retry()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_retry(**settings), stream)

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
        """As `Session.edit()`."""
        await self._settle()
        return await _answer(lambda: self.sync.start_edit(turn, text, **settings), stream)

    async def stop(self) -> Reply | None:
        """As `Session.stop()`."""
        generation = self.sync.running
        if generation is None:
            return None
        await end_of(generation)
        return generation.reply

    async def _settle(self) -> None:
        ending = self.sync.ending
        if ending is not None:
            await end_of(ending)

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

    set_system = _in_thread(Session.set_system)
    set = _in_thread(Session.set)
    set_variables = _in_thread(Session.set_variables)
    set_history = _in_thread(Session.set_history)
    set_title = _in_thread(Session.set_title)
    set_tags = _in_thread(Session.set_tags)
    set_overflow = _in_thread(Session.set_overflow)
    refresh = _in_thread(Session.refresh)
    rename = _in_thread(Session.rename)
    pin = _in_thread(Session.pin)
    predicted_ttft = _in_thread(Session.predicted_ttft)
    export = _in_thread(Session.export)
    close = _in_thread(Session.close)
    delete = _in_thread(Session.delete)

    async def warm(self) -> None:
        """As `Session.warm()`."""
        self.sync.warm()

    async def residence(self) -> Residence:
        """As `Session.residence`."""
        return await asyncio.to_thread(lambda: self.sync.residence)

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
        persist_pages: bool = True,
        disk_quota: int | str | None = None,
        max_queue: int = MAX_QUEUE,
        **engine_options: Any,
    ) -> None:
        self._make = lambda: ChatEngine(
            model,
            store=store,
            persist_pages=persist_pages,
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

    sessions = _in_thread(ChatEngine.sessions)
    delete = _in_thread(ChatEngine.delete)
    score = _in_thread(ChatEngine.score)
    stats = _in_thread(ChatEngine.stats)

    async def import_(
        self, path: str | os.PathLike[str], name: str | None = None, **options: Any
    ) -> AsyncSession:
        """As `ChatEngine.import_()`."""
        take = functools.partial(self.sync.import_, path, name, **options)
        return AsyncSession(await asyncio.to_thread(take))

    async def generate(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[GenerationSettings],
    ) -> Reply:
        """As `ChatEngine.generate()`."""
        return await self.stream(prompt, owner=owner, **settings).result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        owner: str = "local",
        **settings: Unpack[GenerationSettings],
    ) -> AsyncReplyStream:
        """As `ChatEngine.stream()`."""
        return AsyncReplyStream(lambda: self.sync.start_generate(prompt, owner=owner, **settings))

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


async def _answer(start: Callable[[], Generation], stream: bool) -> Reply | AsyncReplyStream:
    replies = AsyncReplyStream(start)
    return replies if stream else await replies.result()
