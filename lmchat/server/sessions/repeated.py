"""Requests that a client repeats with an `Idempotency-Key`.

The first request with a key generates; another one with the same key and body gets the same turn,
also while that is generated, for 24 hours. A new user turn stores its key, so that a request that
is repeated after a restart finds it; the keys of other requests are in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Request

from lmchat.generation.generation import Generation
from lmchat.server.errors import HttpError
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn

HEADER = "Idempotency-Key"
STORED = "idempotency"
"""Key in a user turn's metadata of the request that made it."""

SECONDS = 24 * 3600.0
MOST_KEYS = 1000  # of one owner
MOST_CHARACTERS = 200


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

    def attach(self, detach: bool, linger: float | None = None) -> None:
        """Counts a client that gets the reply.

        Args:
            detach: the reply outlives all clients.
            linger: it goes on for this many seconds without a client, which may come back.
        """
        self._clients += 1
        self._is_detached |= detach
        self._linger = max(self._linger, linger or 0.0)

    def leave(self) -> None:
        """Counts a client that has gone. After the last one the generation stops."""
        self._clients -= 1
        if self._clients or self._linger == 0.0:
            self._stop()
        else:
            asyncio.get_running_loop().call_later(self._linger, self._stop)

    def _stop(self) -> None:
        if not self._clients and not self._is_detached and self.generation is not None:
            self.generation.cancel()


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

    def forget(self, owner: str, session_id: str, key: str) -> None:
        """Removes the entry of a request that was refused, so that it can be repeated."""
        self._entries.get(owner, OrderedDict()).pop((session_id, key), None)


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


def key_of(request: Request) -> str | None:
    """Returns the key of a request, or None.

    Raises:
        HttpError: it is empty or too long.
    """
    key = request.headers.get(HEADER)
    if key is not None and not 1 <= len(key) <= MOST_CHARACTERS:
        raise HttpError(400, f"{HEADER} has {len(key)} characters, expected 1 to {MOST_CHARACTERS}")
    return key


def digest_of(verb: str, body: dict[str, Any]) -> str:
    """Returns the digest of a request, which does not depend on how its reply is sent."""
    same = {k: v for k, v in body.items() if k not in ("stream", "detach", "linger", "token_ids")}
    text = json.dumps([verb, same], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def metadata(session_id: str, key: str, digest: str) -> dict[str, Any]:
    """Returns what a user turn stores of its request. A fork does not inherit its keys."""
    stored = {"session": session_id, "key": key, "digest": digest, "at": int(time.time())}
    return {STORED: stored}


def stored_turn(session: Session, key: str, digest: str) -> Turn | None:
    """Returns the reply that an earlier process has generated for a key, or None.

    Raises:
        HttpError: the key was used with another body.
    """
    tree = session._record.tree
    oldest = time.time() - SECONDS
    for turn in tree:
        found = turn.metadata.get(STORED) if turn.role == "user" else None
        if not isinstance(found, dict):  # an archive may have anything here
            continue
        at = found.get("at")
        if (found.get("session"), found.get("key")) != (session.id, key):
            continue
        if not isinstance(at, int) or at < oldest:
            continue
        check(str(found.get("digest")), digest)
        replies = tree.children(turn.id)
        if replies:
            return replies[0]
    return None
