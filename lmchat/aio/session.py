"""`AsyncSession`: a session for asyncio, with the names of the blocking one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import (
    Any,
    Literal,
    overload,
)

from typing_extensions import Unpack

from lmchat.aio.stream import AsyncFollower, AsyncReplyStream, answer, end_of
from lmchat.aio.threads import Threads, in_thread, shared
from lmchat.forks import watch
from lmchat.generation.generation import Reply
from lmchat.generation.settings import GenerationSettings
from lmchat.generation.state import State
from lmchat.sessions.session import Branch, Session
from lmchat.store.turns import Turn
from turbomind import Residence


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
        return await answer(start, stream, self._threads)

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
        return await answer(lambda: self.sync.start_continue(**settings), stream, self._threads)

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
        return await answer(lambda: self.sync.start_retry(**settings), stream, self._threads)

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
        return await answer(
            lambda: self.sync.start_edit(turn, text, **settings), stream, self._threads
        )

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
