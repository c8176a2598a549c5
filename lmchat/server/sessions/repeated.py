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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


@dataclass
class Entry:
    """One request: the digest of its body, and its generation once that has started."""

    digest: str
    at: float = field(default_factory=time.time)
    started: asyncio.Future[Generation] | None = None


class Repeated:
    """The requests with keys of all owners. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._entries: dict[str, OrderedDict[tuple[str, str], Entry]] = {}

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
    same = {k: v for k, v in body.items() if k not in ("stream", "detach", "token_ids")}
    text = json.dumps([verb, same], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def metadata(key: str | None, digest: str) -> dict[str, Any]:
    """Returns what a user turn stores of its request."""
    return {} if key is None else {STORED: {"key": key, "digest": digest, "at": int(time.time())}}


def stored_turn(session: Session, key: str, digest: str) -> Turn | None:
    """Returns the reply that an earlier process has generated for a key, or None.

    Raises:
        HttpError: the key was used with another body.
    """
    return _search(session, lambda found: found.get("key") == key, digest)


def _search(session: Session, fits: Callable[[dict[str, Any]], bool], digest: str) -> Turn | None:
    tree = session._record.tree
    for turn in tree:
        found = turn.metadata.get(STORED) if turn.role == "user" else None
        if isinstance(found, dict) and fits(found) and found.get("at", 0) > time.time() - SECONDS:
            check(str(found.get("digest")), digest)
            replies = tree.children(turn.id)
            if replies:
                return replies[0]
    return None
