"""Requests that a client repeats with an `Idempotency-Key`.

The first request with a key generates; another one with the same key and body gets the same turn,
also while that is generated, for 24 hours. The key is stored with the turn: with the new user turn
if there is one, else with the reply. So a request that is repeated after a restart finds it. A key
whose generation produced nothing is free again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from lmchat.errors import NotFound
from lmchat.generation.reply_stream import Follower
from lmchat.server.errors import HttpError
from lmchat.sessions.session import Session
from lmchat.store.once import Once
from lmchat.store.turns import Turn, TurnTree

HEADER = "Idempotency-Key"
STORED = "idempotency:"
"""Start of the name of a key in a turn's metadata. A continued reply has several."""

SECONDS = 24 * 3600.0
"""Time for which a key is that of its request."""


def check(stored: str, digest: str) -> None:
    """Raises HttpError unless both digests are of one body."""
    if stored != digest:
        raise HttpError(
            422,
            f"the {HEADER} was used with another body, expected a new key",
            code="idempotency_key_reused",
        )


def digest_of(verb: str, body: Mapping[str, Any]) -> str:
    """Returns the digest of a request: of what it asks for, not of how the reply is sent."""
    text = json.dumps([verb, body], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def metadata(session_id: str, key: str, digest: str) -> dict[str, Any]:
    """Returns what a turn stores of its request. A fork does not inherit the keys."""
    return {STORED + key: {"session": session_id, "digest": digest, "at": int(time.time())}}


def once(key: str | None, verb: str, body: Mapping[str, Any]) -> Once | None:
    """Returns the key of a change that generates nothing; None: it has none."""
    if key is None:
        return None
    digest = digest_of(verb, body)
    return Once(key, digest, functools.partial(check, digest=digest))


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
    found = [turn for turn in tree if _has(turn.metadata, session_id, key, digest)]
    replies = [turn for turn in found if turn.role == "assistant"]
    if replies:
        return replies[-1]
    return next((reply for turn in found for reply in tree.children(turn.id)), None)


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
