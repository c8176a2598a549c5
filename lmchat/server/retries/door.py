"""A request for a turn, and the way from it to its reply: running, stored, or new."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lmchat.aio.threads import shared
from lmchat.errors import EngineClosed, NotFound, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.generation.reply import Reply
from lmchat.generation.reply_stream import Follower
from lmchat.server.http.event_stream import Disconnected
from lmchat.server.retries import keys, marks, turn
from lmchat.server.retries.answers import RelayedAnswer, StoredAnswer
from lmchat.server.retries.entries import Entries
from lmchat.server.retries.entry import Answer, Entry
from lmchat.server.retries.turn import Awaited, Cut, Elsewhere, Found, Nothing, Running, Whole
from lmchat.sessions.reply_turn import is_cut
from lmchat.sessions.session import Session
from lmchat.store.turns import TurnTree

NOTICE_SECONDS = 1.0
"""Longest wait of a request equal to a running one for the news that its client has gone. Then it
is another request, which a session that generates refuses."""

_PAUSE = 0.03  # seconds between two looks

Check: TypeAlias = Callable[[TurnTree], object]
Prepare: TypeAlias = Callable[[Session], tuple[dict[str, Any], Check]]
"""Returns the metadata that a new turn of a session gets, and the check before its start."""


@dataclass(frozen=True)
class Door:
    """A request for a turn, as its dialect describes it.

    Attributes:
        owner: the owner.
        digest: of what the client has sent: messages, and what changes the reply.
        sessions: returns the sessions in which the turn of an equal request may be; it may wait.
        start: starts a new turn; it may wait. It calls its first argument with the session. The
            second is the session of an equal turn of which nothing is stored, if there is one.
        key: the `Idempotency-Key`, or None.
        body: digest of the body that belongs to the key.
        scope: what the key is unique in, such as the id of a session.
        is_named: whether the request names its session. Then it waits a moment for the end of an
            equal one before it starts a second one.
        detach: whether the reply outlives its clients.
        linger: seconds for which the reply continues without a client.
        is_relayed: whether a reply of another process will do, which has no log-probabilities.
        carried: key of the question's metadata that a continued reply gets too; empty: none.
        overflow: what happens when a continued reply does not fit the context; None: the session's.
    """

    owner: str
    digest: str
    sessions: Callable[[], Sequence[Session]]
    start: Callable[[Prepare, Session | None], tuple[Session, Generation]]
    key: str | None = None
    body: str = ""
    scope: str = ""
    is_named: bool = True
    detach: bool = False
    linger: float = 0.0
    is_relayed: bool = True
    carried: str = ""
    overflow: str | None = None


async def open_door(entries: Entries, door: Door) -> Entry:
    """Returns the entry of a request, to which one client is attached: it calls `leave()` once.

    Raises:
        SessionBusy: the session generates the reply to another request, or to an equal one whose
            client waits for it.
        HttpError: the key was used with another body.
        Error: the turn cannot be started.
    """
    way = _Way(entries, door)
    entry = await (way.unkeyed() if door.key is None else way.keyed(door.key))
    entry.attach(door.detach, door.linger)
    return entry


class _Again(Exception):
    """The session has changed: look again."""


class _Way:
    """Finds or starts the turn of one request."""

    def __init__(self, entries: Entries, door: Door) -> None:
        self._entries = entries
        self._door = door

    # --- without a key ---------------------------------------------------------------------------

    async def unkeyed(self) -> Entry:
        """Returns the entry of a request without a key."""
        loop = asyncio.get_running_loop()
        patient_until = loop.time() + (NOTICE_SECONDS if self._door.is_named else 0.0)
        while True:
            found = await shared.run(self._find)
            entry, is_awaited = await self._taken(found)
            if entry is None and is_awaited and loop.time() < patient_until:
                await asyncio.sleep(_PAUSE)
            elif entry is None and (found is None or is_awaited or isinstance(found, Nothing)):
                entry = await self._started(found)
            if entry is not None:
                return entry

    def _find(self) -> Found | None:
        door, live = self._door, self._entries.live
        found = [turn.find(session, door.digest, live) for session in door.sessions()]
        best = [one for one in found if one is not None and not isinstance(one, Awaited | Nothing)]
        return next(iter([*best, *(one for one in found if one is not None)]), None)

    async def _taken(self, found: Found | None) -> tuple[Entry | None, bool]:
        """Returns the entry of what was found, if it can be taken over, else whether a client waits
        for it."""
        if isinstance(found, Running):
            answer = found.entry.answer
            if answer is not None and answer.cancelled:
                await found.entry.ended()
                return None, False
            return (None, True) if found.entry.clients else (found.entry, False)
        if isinstance(found, Cut):
            return await self._resumed(found), False
        if isinstance(found, Whole):
            answer = StoredAnswer(found.turn)
            entry = Entry(self._door.digest, found.session, found.token, answer)
            entry.is_resumed = entry.has_been_left = True
            return self._entries.add(entry), False
        if isinstance(found, Elsewhere):
            if self._door.is_relayed:
                return self._relayed(found), False
            found.follower.close()
            return None, True
        return None, isinstance(found, Awaited)

    # --- with a key ------------------------------------------------------------------------------

    async def keyed(self, key: str) -> Entry:
        """Starts a generation, unless a request with the same key has, in any process, and its
        reply is there."""
        door, table = self._door, self._entries
        while True:
            entry, is_new = table.enter(door.owner, door.scope, key, door.body)
            if is_new:
                break
            await asyncio.shield(entry.started)
            if await entry.produces():
                return entry
            table.forget(door.owner, door.scope, key, entry)
        try:
            taken = await self._keyed()
        except BaseException as error:
            table.forget(door.owner, door.scope, key, entry)
            refusal = error if isinstance(error, Exception) else Disconnected()
            entry.started.set_exception(refusal)
            entry.started.exception()  # asyncio logs those that are not retrieved
            raise
        entry.session, entry.token, entry.answer = taken.session, taken.token, taken.answer
        entry.is_resumed, entry.has_been_left = taken.is_resumed, taken.has_been_left
        if isinstance(taken.answer, RelayedAnswer):
            taken.answer.entry = entry
        table.add(entry)
        entry.started.set_result(None)
        return entry

    async def _keyed(self) -> Entry:
        while True:
            try:
                found = await shared.run(self._find_key)
                entry, is_awaited = await self._taken(found)
                if is_awaited:
                    raise SessionBusy("another process generates this reply: wait for its end")
                if found is None:
                    entry = await self._started(None)
            except SessionBusy:  # another process may have started the reply of this key meanwhile
                found = await shared.run(self._find_key)
                if found is None:
                    raise
                entry = (await self._taken(found))[0]
            if entry is not None:
                return entry

    def _find_key(self) -> Found | None:
        door = self._door
        assert door.key is not None
        for session in door.sessions():
            reply = keys.find(session, door.key, door.body)
            if reply is None:
                continue
            request = marks.read(session)
            if isinstance(reply, Follower):
                token = -1 if request is None else request.fencing_token
                return Elsewhere(session, reply, token)
            if turn.left_by(session, reply, self._entries.live):
                return Cut(session, reply)
            is_last = request is not None and request.turn == reply.id
            return Whole(session, reply, request.fencing_token if request and is_last else None)
        return None

    # --- starts ----------------------------------------------------------------------------------

    async def _started(self, found: Found | None) -> Entry | None:
        """Starts a new turn; None: an equal one was cut or stored in this moment."""
        at = found.session if isinstance(found, Nothing) else None
        try:
            session, generation = await shared.run(self._door.start, self._prepare, at)
        except (_Again, keys.Stored):
            return None
        except NotFound:
            if at is None:
                raise
            return None  # the empty session has just been deleted
        return self._entries.add(Entry.of(self._door.digest, session, generation))

    def _prepare(self, session: Session) -> tuple[dict[str, Any], Check]:
        door = self._door
        if door.key is not None:
            found = keys.metadata(session.id, door.key, door.body)
            check = functools.partial(
                keys.check_new, session_id=session.id, key=door.key, digest=door.body
            )
            return found, check

        def unless_cut(_tree: TurnTree) -> None:
            found = turn.look(session, door.digest, self._entries.live)
            if isinstance(found, Cut | Whole):
                raise _Again

        return {}, unless_cut

    async def _resumed(self, cut: Cut) -> Entry | None:
        """Continues a reply that was cut; None: it has changed in this moment."""
        door, reply = self._door, cut.turn
        metadata: dict[str, Any] = {}
        if door.key is not None:
            metadata = keys.metadata(cut.session.id, door.key, door.body)
        if door.carried and reply.parent is not None:
            question = cut.session._record.tree.get(reply.parent)
            metadata[door.carried] = question.metadata.get(door.carried)

        def unchanged(tree: TurnTree) -> None:
            if reply.id not in tree or tree.get(reply.id) != reply or tree.children(reply.id):
                raise _Again

        def start() -> Generation:
            return cut.session.start_resume(
                overflow=door.overflow, metadata=metadata, request=door.digest, check=unchanged
            )

        try:
            generation = await shared.run(start)
        except (_Again, NotFound):
            return None
        entry = Entry.of(door.digest, cut.session, generation)
        entry.is_resumed = True
        return self._entries.add(entry)

    def _relayed(self, found: Elsewhere) -> Entry:
        """Returns the entry of a reply of another process, which is continued here if it is cut."""

        async def continuing(reply: Reply) -> Answer | None:
            if reply.turn is not None and not is_cut(reply.turn):
                return None
            left = await shared.run(turn.cut_elsewhere, found.session, answer.entry.token)
            if isinstance(left, Nothing):
                raise EngineClosed("the process of the reply ended before its first token")
            more = await self._resumed(left) if isinstance(left, Cut) else None
            if more is None:
                return None
            entry = answer.entry
            entry.token, entry.is_resumed = more.token, True
            self._entries.add(entry)
            return more.answer

        answer = RelayedAnswer(found.follower, continuing)
        answer.entry = Entry(self._door.digest, found.session, found.token, answer)
        answer.entry.has_been_left = True
        return self._entries.add(answer.entry)
