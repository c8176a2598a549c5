"""One request whose turn is generated or stored, and the clients that wait for its reply."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from lmchat.aio.stream import AsyncFollower
from lmchat.errors import Error
from lmchat.generation.generation import Generation
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.server.retries.marks import mark_later
from lmchat.sessions.reply_turn import is_cut
from lmchat.sessions.session import Session

SETTLE_SECONDS = 0.5
"""Time from the last byte of a response until the store has that the client got it. If the process
dies before, what it sent may have been lost on the way, so a repeated request gets the reply."""


class Answer(Protocol):
    """A reply that clients wait for: of a generation here, of another process, or a stored one."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    @property
    def cancelled(self) -> bool:
        """Whether a caller has asked it to stop."""

    @property
    def reply(self) -> Reply | None:
        """The reply. None before the end, and if it failed before its first token."""

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that it is or becomes."""

    def follow(self) -> Follower:
        """Returns a new reader of all of it."""

    def cancel(self) -> None:
        """Requests that it stops. Never waits."""


@dataclass(eq=False)
class Entry:
    """One request and those that repeat it. Used on the event loop's thread.

    Attributes:
        digest: digest of what the client has sent.
        session: the session of its turn, once that is known.
        token: fencing token of the turn's lease; None: the store has nothing of the request.
        answer: its reply, once that is known.
        at: time of the first request, in seconds of the epoch.
        started: done when the reply is known, or the request was refused.
        clients: number of clients that wait for the reply.
        settled: called when a client has got the reply.
        has_been_left: whether the last client that waited has left without it.
        is_resumed: whether the reply continues one that was cut, or may be such a one.
    """

    digest: str
    session: Session | None = None
    token: int | None = None
    answer: Answer | None = None
    at: float = field(default_factory=time.time)
    started: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    clients: int = 0
    is_resumed: bool = False
    has_been_left: bool = False
    _is_detached: bool = False
    settled: Callable[[Entry], object] = lambda entry: entry.mark_settled()
    _is_settled: bool = False
    _linger: float = 0.0
    _stopping: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, digest: str, session: Session, generation: Generation) -> Entry:
        """Returns the entry of a generation that has started."""
        token = None if generation.lease is None else generation.lease.fencing_token
        return cls(digest, session, token, generation)

    @property
    def is_settled(self) -> bool:
        """Whether a client has the reply."""
        return self._is_settled

    def attach(self, detach: bool, linger: float = 0.0) -> None:
        """Counts a client that gets the reply.

        Args:
            detach: the reply outlives all clients.
            linger: it continues for this many seconds without a client, which may come back.
        """
        self.clients += 1
        self._is_detached |= detach
        self._linger = max(self._linger, linger)
        if self.has_been_left:
            self._mark("open")
            self.has_been_left = False
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None

    def leave(self, has_reply: bool = False) -> None:
        """Counts a client that has gone. After the last one the generation stops.

        Args:
            has_reply: whether the whole reply was sent to it.
        """
        self.clients -= 1
        if has_reply and not self._is_settled:
            self._is_settled = True
            self.settled(self)
        if self.clients:
            return
        if not self._is_settled:
            self.has_been_left = True
            self._mark("left")
        answer = self.answer
        if self._is_detached or answer is None or answer.done:
            return
        if self._linger:
            loop = asyncio.get_running_loop()
            self._stopping = loop.call_later(self._linger, answer.cancel)
        else:
            answer.cancel()

    def lose(self) -> None:
        """Counts a client as gone that turned out not to have got the reply, which was sent."""
        reply = None if self.answer is None else self.answer.reply
        if self.clients or reply is None or reply.finish_reason == "cancelled":
            return
        self._is_settled, self.has_been_left = False, True
        self._mark("left", again=True)

    def mark_settled(self) -> None:
        """Stores that a client has the reply, unless it turned out not to have got it."""
        if self._is_settled:
            self._mark("settled")

    def _mark(self, state: Literal["open", "left", "settled"], again: bool = False) -> None:
        if self.session is not None and self.token is not None:
            mark_later(self.session, self.token, state, again)

    def whole(self, reply: Reply) -> Reply:
        """Returns a finished reply with the usage of all its tokens, also of those from before it
        was cut."""
        turn = reply.turn
        if turn is None or not self.is_resumed:
            return reply
        usage = replace(
            reply.usage,
            prompt_tokens=turn.prefix_length,
            completion_tokens=len(turn.token_ids),
            cached_tokens=min(reply.usage.cached_tokens, turn.prefix_length),
        )
        return replace(reply, usage=usage)

    async def ended(self) -> Reply | None:
        """Waits for the end of the reply. Returns None for one that failed before its first
        token."""
        assert self.answer is not None
        async with AsyncFollower(self.answer.follow()) as follower:
            with contextlib.suppress(Error):
                return await follower.result()
        return None

    async def produces(self) -> bool:
        """Returns whether a repeated request gets this reply: not one that failed, or was cancelled
        before its first token, or that its clients left before its end. Waits for the end of a
        cancelled one."""
        answer = self.answer
        if answer is None:
            return False
        if answer.cancelled:
            await self.ended()
        if not answer.done:
            return True
        reply = answer.reply
        if reply is None:
            return False
        if reply.finish_reason == "cancelled" and not reply.usage.completion_tokens:
            return False
        return reply.turn is None or not (self.has_been_left and is_cut(reply.turn))
