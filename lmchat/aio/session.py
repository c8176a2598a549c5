"""`AsyncSession`: a session for asyncio, with the names of the blocking one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

from typing_extensions import Unpack

from lmchat.aio.stream import AsyncFollower, AsyncReplyStream, end_of
from lmchat.aio.threads import Threads, in_thread, same, shared
from lmchat.forks import watch
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.interface.session import Branch
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn
from turbomind import Residence

P = ParamSpec("P")


def opening(
    verb: Callable[Concatenate[Any, P], Session],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncSession]]:
    """Returns a method of `sync` for asyncio, whose session is one for asyncio too."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> AsyncSession:
        threads: Threads = self._threads
        return AsyncSession(await threads.run(verb, self.sync, *args, **kwargs), threads)

    call.__doc__ = inspect.getdoc(verb)  # which may be that of a base
    return call


class AsyncSession:
    """A `Session` for asyncio, made by `AsyncChatEngine.session()`. `sync` is the session
    itself."""

    def __init__(self, session: Session, threads: Threads | None = None) -> None:
        watch(self)
        self.sync = session
        self._threads = threads or shared

    id: str = same(Session.id)
    name: str = same(Session.name)
    owner: str = same(Session.owner)
    created: datetime = same(Session.created)
    revision: int = same(Session.revision)
    pinned: bool = same(Session.pinned)
    tags: tuple[str, ...] = same(Session.tags)
    metadata: dict[str, str] = same(Session.metadata)
    overflow: str = same(Session.overflow)
    unanswered: str | None = same(Session.unanswered)
    notices: tuple[str, ...] = same(Session.notices)
    history: str = same(Session.history)
    settings: dict[str, Any] = same(Session.settings)
    template_variables: dict[str, Any] = same(Session.template_variables)
    state: State = same(Session.state)
    length: int = same(Session.length)
    running: Generation | None = same(Session.running)
    ending: Generation | None = same(Session.ending)

    @property
    def fresh(self) -> bool:
        """Whether this process created the session."""
        return self.sync.fresh

    @fresh.setter
    def fresh(self, fresh: bool) -> None:
        self.sync.fresh = fresh

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

    async def send(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Reply:
        """Generates a reply, as `Session.send()`. Cancelling the await stops the generation and
        commits the tokens that it has produced."""
        return await self.stream(text, template_variables=template_variables, **settings).result()

    def stream(
        self,
        text: str,
        *,
        template_variables: Mapping[str, Any] | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> AsyncReplyStream:
        """Generates a reply, as `Session.stream()`. The generation begins at the first `await`
        when an earlier one is still ending."""
        return self._streamed(
            functools.partial(
                self.sync.start_send, text, template_variables=template_variables, **settings
            )
        )

    async def continue_(self, **settings: Unpack[GenerationSettings]) -> Reply:
        """Extends the last reply in place, as `Session.continue_()`."""
        return await self.stream_continue(**settings).result()

    def stream_continue(self, **settings: Unpack[GenerationSettings]) -> AsyncReplyStream:
        """Extends the last reply in place, as `Session.stream_continue()`."""
        return self._streamed(functools.partial(self.sync.start_continue, **settings))

    async def retry(self, **settings: Unpack[GenerationSettings]) -> Reply:
        """Generates another reply to the last user turn, as `Session.retry()`."""
        return await self.stream_retry(**settings).result()

    def stream_retry(self, **settings: Unpack[GenerationSettings]) -> AsyncReplyStream:
        """Generates another reply to the last user turn, as `Session.stream_retry()`."""
        return self._streamed(functools.partial(self.sync.start_retry, **settings))

    async def edit(self, turn: int, text: str, **settings: Unpack[GenerationSettings]) -> Reply:
        """Generates a reply to `text` in place of a user turn, as `Session.edit()`."""
        return await self.stream_edit(turn, text, **settings).result()

    def stream_edit(
        self, turn: int, text: str, **settings: Unpack[GenerationSettings]
    ) -> AsyncReplyStream:
        """Generates a reply to `text` in place of a user turn, as `Session.stream_edit()`."""
        return self._streamed(functools.partial(self.sync.start_edit, turn, text, **settings))

    def _streamed(self, start: Callable[[], Generation]) -> AsyncReplyStream:
        return AsyncReplyStream(start, self.sync.ending, self._threads)

    start_send = in_thread(Session.start_send)
    start_retry = in_thread(Session.start_retry)
    start_edit = in_thread(Session.start_edit)
    start_continue = in_thread(Session.start_continue)

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

    fork = opening(Session.fork)
    append = in_thread(Session.append)
    edit_reply = in_thread(Session.edit_reply)
    conversation = in_thread(Session.conversation)
    annotate = in_thread(Session.annotate)
    count_tokens = in_thread(Session.count_tokens)
    update = in_thread(Session.update)
    set_system = in_thread(Session.set_system)
    set = in_thread(Session.set)
    set_variables = in_thread(Session.set_variables)
    set_history = in_thread(Session.set_history)
    set_title = in_thread(Session.set_title)
    set_tags = in_thread(Session.set_tags)
    set_metadata = in_thread(Session.set_metadata)
    set_overflow = in_thread(Session.set_overflow)
    refresh = in_thread(Session.refresh)
    rename = in_thread(Session.rename)
    pin = in_thread(Session.pin)
    predicted_ttft = in_thread(Session.predicted_ttft)
    export = in_thread(Session.export)
    close = in_thread(Session.close)
    delete = in_thread(Session.delete)

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
