"""The requests that the last turns of sessions answer: SQL statements.

A row that cannot be read is none: then a request that is repeated is a new one.
"""

from __future__ import annotations

import sqlite3
import time

from lmchat.store.records import AskedState, TurnRequest
from lmchat.store.sqlite import codec

TABLE = """
CREATE TABLE requests (
  session INTEGER PRIMARY KEY,
  epoch INTEGER NOT NULL,
  owner TEXT NOT NULL,
  digest TEXT NOT NULL,
  turn INTEGER NOT NULL,
  state INTEGER NOT NULL,
  at INTEGER NOT NULL
);
CREATE INDEX requests_by_digest ON requests (digest) WHERE state <> 2;
CREATE TRIGGER sessions_answer_nothing AFTER DELETE ON sessions BEGIN
  DELETE FROM requests WHERE session = old.key;
END;
ALTER TABLE journal_tokens ADD COLUMN at INTEGER;
"""
"""`state` is 0 to 2 in the order of `_STATES`, `epoch` the fencing token of the turn's lease,
`owner` the process that answers the request, `at` the time of the last change in seconds since
1970. The last token of a journal has the time until which its process lived."""

_MOST = 64  # equal requests that are looked at

_STATES: tuple[AskedState, ...] = ("open", "left", "settled")


def begin(
    connection: sqlite3.Connection, key: int, token: int, owner: str, digest: str, turn: int
) -> None:
    """Replaces the session's request by the one that a new turn answers; empty: it has none."""
    if not digest:
        connection.execute("DELETE FROM requests WHERE session = ?", (key,))
        return
    connection.execute(
        "INSERT OR REPLACE INTO requests (session, epoch, owner, digest, turn, state, at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (key, token, owner, codec.column(digest), turn, 0, _now()),
    )


def mark(
    connection: sqlite3.Connection,
    key: int,
    token: int,
    state: AskedState,
    owner: str,
    again: bool = False,
) -> None:
    """Changes the state of the request whose turn has the lease of this fencing token, unless it is
    settled; `again`: of a settled one too. The process of `owner` answers it from now on."""
    connection.execute(
        "UPDATE requests SET state = ?, at = ?, owner = ? WHERE session = ? AND epoch = ? "
        "AND (state <> 2 OR ?)",
        (_STATES.index(state), _now(), owner, key, token, again),
    )


def end(connection: sqlite3.Connection, key: int, token: int) -> None:
    """Records when the turn of a request has ended: now, or at the last token of its journal if
    another lease recovers it. The journal must still be there."""
    found = connection.execute("SELECT epoch FROM requests WHERE session = ?", (key,)).fetchone()
    if found is None:
        return
    at: int | None = _now()
    if found[0] != token:
        (at,) = connection.execute(
            "SELECT max(at) FROM journal_tokens WHERE session = ?", (key,)
        ).fetchone()
    if at is not None:
        connection.execute("UPDATE requests SET at = ? WHERE session = ?", (at, key))


def read(connection: sqlite3.Connection, key: int) -> tuple[TurnRequest, str] | None:
    """Returns the session's request and the process that answers it, or None."""
    found = connection.execute(
        "SELECT digest, turn, epoch, state, at, owner FROM requests WHERE session = ?", (key,)
    ).fetchone()
    if found is None:
        return None
    digest, turn, token, state, at, owner = found
    try:
        request = TurnRequest(codec.decode(digest), int(turn), int(token), _STATES[state], int(at))
        return request, codec.decode(owner)
    except (ValueError, TypeError, AttributeError, LookupError):
        return None


def equal(connection: sqlite3.Connection, owner: str, digest: str) -> list[str]:
    """Returns the ids of an owner's sessions whose last turn answers such a request and which is
    not settled, the newest first."""
    found = connection.execute(
        "SELECT s.id FROM requests AS r JOIN sessions AS s ON s.key = r.session "
        "WHERE r.digest = ? AND r.state <> 2 AND s.owner = ? ORDER BY r.at DESC LIMIT ?",
        (codec.column(digest), codec.column(owner), _MOST),
    )
    return [codec.decode(session) for (session,) in found]


def _now() -> int:
    return int(time.time())
