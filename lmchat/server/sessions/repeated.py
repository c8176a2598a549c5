"""Requests that a client repeats with an `Idempotency-Key`.

The first request with a key generates; another one with the same key and body gets the same turn,
also while that is generated, for 24 hours. The key is stored with the turn: with the new user turn
if there is one, else with the reply. So a request that is repeated after a restart finds it. A key
whose generation produced nothing is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from lmchat.aio_stream import AsyncFollower
from lmchat.errors import Error, NotFound
from lmchat.generation.generation import Generation
from lmchat.generation.reply_stream import Follower
from lmchat.server.errors import HttpError
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn, TurnTree

HEADER = "Idempotency-Key"
STORED = "idempotency:"
"""Start of the name of a key in a turn's metadata. A continued reply has several."""

SECONDS = 24 * 3600.0
MOST_KEYS = 1000  # of one owner

LINGER = 30.0
"""Default of `linger` for a request with a key, in seconds. A client whose connection broke repeats
its request within this time and gets the same reply."""


@dataclass(eq=False)
class Entry:
    """One request and those that repeat it.

    Attributes:
        digest: digest of its body.
        at: time of the first request, in seconds of the epoch.
        generation: its generation, once that has started.
        earlier: its reply, if an earlier process has generated that.
        started: done when one of both is known, or the request was refused.
    """

    digest: str
    at: float = field(default_factory=time.time)
    generation: Generation | None = None
    earlier: Turn | None = None
    started: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _clients: int = 0
    _is_detached: bool = False
    _linger: float = 0.0
    _stopping: asyncio.TimerHandle | None = None

    def attach(self, detach: bool, linger: float = 0.0) -> None:
        """Counts a client that gets the reply.

        Args:
            detach: the reply outlives all clients.
            linger: it continues for this many seconds without a client, which may come back.
        """
        self._clients += 1
        self._is_detached |= detach
        self._linger = max(self._linger, linger)
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None

    def leave(self) -> None:
        """Counts a client that has gone. After the last one the generation stops."""
        self._clients -= 1
        if self._clients or self._is_detached or self.generation is None or self.generation.done:
            return
        if self._linger:
            loop = asyncio.get_running_loop()
            self._stopping = loop.call_later(self._linger, self.generation.cancel)
        else:
            self.generation.cancel()

    async def produces(self) -> bool:
        """Returns whether its reply is stored, or may be: not that of a generation that failed or
        was cancelled before its first token. False too for a reply that another process generates.
        Waits for the end of a cancelled one."""
        generation = self.generation
        if generation is None:
            return self.earlier is not None
        if generation.cancelled:
            async with AsyncFollower(generation.follow()) as follower:
                with contextlib.suppress(Error):
                    await follower.result()
        if not generation.done:
            return True
        reply = generation.reply
        return reply is not None and (
            reply.finish_reason != "cancelled" or reply.usage.completion_tokens > 0
        )


class Repeated:
    """The requests with keys of all owners. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._entries: dict[str, OrderedDict[tuple[str, str], Entry]] = {}
        self._running: WeakValueDictionary[int, Entry] = WeakValueDictionary()

    def remember(self, entry: Entry) -> None:
        """Makes an entry known by its generation."""
        self._running[id(entry.generation)] = entry

    def of(self, generation: Generation) -> Entry | None:
        """Returns the entry of a running generation, or None if no request has started it."""
        return self._running.get(id(generation))

    def enter(self, owner: str, session_id: str, key: str, digest: str) -> tuple[Entry, bool]:
        """Returns the entry of a key, and whether it is new.

        Raises:
            HttpError: the key was used with another body.
        """
        entries = self._entries.setdefault(owner, OrderedDict())
        oldest = time.time() - SECONDS
        while entries and (len(entries) >= MOST_KEYS or _first(entries).at < oldest):
            entries.popitem(last=False)
        found = entries.get((session_id, key))
        if found is None:
            entries[session_id, key] = found = Entry(digest)
            return found, True
        check(found.digest, digest)
        return found, False

    def forget(self, owner: str, session_id: str, key: str, entry: Entry) -> None:
        """Removes the entry of a request that was refused or produced nothing, so that it can be
        repeated. A later entry with the key stays."""
        entries = self._entries.get(owner, OrderedDict())
        if entries.get((session_id, key)) is entry:
            del entries[session_id, key]


def _first(entries: OrderedDict[tuple[str, str], Entry]) -> Entry:
    return next(iter(entries.values()))


def check(stored: str, digest: str) -> None:
    """Raises HttpError unless both digests are of one body."""
    if stored != digest:
        raise HttpError(
            422,
            f"the {HEADER} was used with another body, expected a new key",
            code="idempotency_key_reused",
        )


def digest_of(verb: str, body: dict[str, Any]) -> str:
    """Returns the digest of a request, which does not depend on how its reply is sent."""
    same = {k: v for k, v in body.items() if k not in ("stream", "detach", "linger", "token_ids")}
    text = json.dumps([verb, same], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def metadata(session_id: str, key: str, digest: str) -> dict[str, Any]:
    """Returns what a turn stores of its request. A fork does not inherit the keys."""
    return {STORED + key: {"session": session_id, "digest": digest, "at": int(time.time())}}


class Stored(Exception):
    """A generation is refused because its key has a reply already.

    Attributes:
        turn: the reply.
    """

    def __init__(self, turn: Turn) -> None:
        super().__init__(f"the reply is stored as turn {turn.id}")
        self.turn = turn


def find(session: Session, key: str, digest: str) -> Turn | Follower | None:
    """Returns the reply of a key that another process has generated, or a reader of the one that
    it generates now, or None. A stored one is as long as later requests have made it.

    Raises:
        HttpError: the key was used with another body.
    """
    with contextlib.suppress(NotFound):  # there is no reply
        follower = session.follow()  # it reads the turns of other processes too
        if not follower.done and _has(follower.metadata, session.id, key, digest):
            return follower
        follower.close()
    return _stored_turn(session._record.tree, session.id, key, digest)


def check_new(tree: TurnTree, session_id: str, key: str, digest: str) -> None:
    """Raises Stored if a key of a session has a reply, HttpError if it is that of another body."""
    turn = _stored_turn(tree, session_id, key, digest)
    if turn is not None:
        raise Stored(turn)


def _stored_turn(tree: TurnTree, session_id: str, key: str, digest: str) -> Turn | None:
    for turn in tree:
        if _has(turn.metadata, session_id, key, digest):
            replies = tree.children(turn.id) if turn.role == "user" else [turn]
            if replies:
                return replies[0]
    return None


def _has(metadata: Mapping[str, Any], session_id: str, key: str, digest: str) -> bool:
    """Returns whether metadata of a turn has this key of a session, not older than `SECONDS`.

    Raises:
        HttpError: the key was used with another body.
    """
    found = metadata.get(STORED + key)
    if not isinstance(found, dict) or found.get("session") != session_id:
        return False  # an archive may have anything here
    at = found.get("at")
    if not isinstance(at, int) or at < time.time() - SECONDS:
        return False
    check(str(found.get("digest")), digest)
    return True
