"""Replies that no generation of this server makes from their start: stored ones, and those of other
processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lmchat.aio.stream import AsyncFollower
from lmchat.errors import EngineClosed, Error, InternalError
from lmchat.generation.parts import Delta, PartsLog
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.server.retries.entry import Answer, Entry
from lmchat.sessions.remote_reply import stored_reply
from lmchat.store.turns import Turn


class StoredAnswer:
    """A reply that is stored.

    Args:
        turn: its turn.
    """

    done = True
    cancelled = False

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        with stored_reply(turn) as reader:
            self.reply: Reply | None = reader.reply

    @property
    def turn_id(self) -> int | None:
        """Id of its turn."""
        return self._turn.id

    def follow(self) -> Follower:
        """Returns a new reader of all of it."""
        return stored_reply(self._turn)

    def cancel(self) -> None:
        """Does nothing: it has ended."""


Continue = Callable[[Reply], Awaitable[Answer | None]]
"""Returns what continues a reply that was cut, here; None: nothing does."""


class RelayedAnswer:
    """A reply that another process generates. If it is cut there, it is continued here.

    It is made and used on the event loop's thread.

    Args:
        follower: a reader of the reply.
        continuing: continues it when it has ended.
    """

    def __init__(self, follower: Follower, continuing: Continue) -> None:
        self.cancelled = False
        self.entry: Entry
        """The request that it is the answer to."""
        self._log = PartsLog()
        self._log.turn_id = follower.turn_id
        self._log.metadata = follower.metadata
        self._continuing = continuing
        self._here: Answer | None = None  # what continues it
        self._passed: dict[str, str] = {"text": "", "reasoning": ""}
        self._tokens = 0  # of the parts that were passed on
        self._task = asyncio.ensure_future(self._run(follower))

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._log.done

    @property
    def reply(self) -> Reply | None:
        """The reply; None before its end."""
        return self._log.reply

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that it becomes."""
        return self._log.turn_id

    def follow(self) -> Follower:
        """Returns a new reader of all of it."""
        return Follower(self._log)

    def cancel(self) -> None:
        """Ends the reading, and the reply if it is generated here."""
        self.cancelled = True
        if self._here is not None:
            self._here.cancel()
        else:
            self._task.cancel()

    async def _run(self, follower: Follower) -> None:
        try:
            reply = await self._relay(follower)
            while (here := await self._continuing(reply)) is not None:
                self._here = here
                self._log.turn_id = here.turn_id
                reply = await self._relay(here.follow())
            self._log.end(reply, None)
        except Error as error:
            self._log.end(None, error)
        except BaseException as error:
            self._log.end(None, EngineClosed("the reader of another process's reply has ended"))
            if not isinstance(error, asyncio.CancelledError):
                raise

    async def _relay(self, follower: Follower) -> Reply:
        """Passes on what is new of a reply, and returns it at its end."""
        seen, tokens = {"text": "", "reasoning": ""}, 0
        async with AsyncFollower(follower) as reader:
            async for part in reader.events():
                if isinstance(part, Delta):
                    tokens += len(part.token_ids)
                    new = self._new(part, seen, tokens)
                    self._log.append([] if new is None else [new])
                else:
                    self._log.append([part])
            return await reader.result()

    def _new(self, part: Delta, seen: dict[str, str], tokens: int) -> Delta | None:
        """Returns what has not been passed on of a part; None: all has."""
        kind, before = part.kind, self._passed[part.kind]
        at = seen[kind] = seen[kind] + part.text
        ids = part.token_ids[max(0, len(part.token_ids) - max(0, tokens - self._tokens)) :]
        self._tokens = max(self._tokens, tokens)
        if len(at) <= len(before):
            return part._replace(text="", token_ids=ids) if ids else None
        if not at.startswith(before):
            raise InternalError(
                "the reply continues another text than was sent: repeat the request"
            )
        self._passed[kind] = at
        return part._replace(text=at[len(before) :], token_ids=ids)
