"""Leases, and what a generation keeps before its turn is acknowledged: statements on the tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from lmchat.durable import codec, rows
from lmchat.store import JournalEntry, Lease, TurnStart

_FAR = 1 << 48  # epochs that no session comes to


def holder(connection: sqlite3.Connection, key: int) -> tuple[int, str | None]:
    """The session's last epoch (0: none yet) and the owner of its lease. A damaged lease is
    nobody's, and the next epoch is above all that were."""
    found = connection.execute("SELECT epoch, owner FROM leases WHERE session = ?", (key,))
    epoch, owner = found.fetchone() or (0, None)
    if not isinstance(epoch, int) or not 0 <= epoch <= _FAR:
        return _FAR, None
    return epoch, owner.decode("utf-8", "replace") if isinstance(owner, bytes) else None


def lend(connection: sqlite3.Connection, key: int, owner: str) -> int:
    """Gives the lease to an owner; its epoch."""
    epoch = holder(connection, key)[0] + 1
    connection.execute(
        "INSERT INTO leases (session, epoch, owner) VALUES (?, ?, ?) "
        "ON CONFLICT (session) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner",
        (key, epoch, owner),
    )
    return epoch


def held(connection: sqlite3.Connection, lease: Lease, owner: str) -> int | None:
    """The key of the lease's session while it is the owner's newest one."""
    found = connection.execute(
        "SELECT s.key FROM sessions AS s JOIN leases AS l ON l.session = s.key "
        "WHERE s.id = ? AND l.epoch = ? AND l.owner = ?",
        (codec.column(lease.session), lease.epoch, owner),
    ).fetchone()
    return None if found is None else int(found[0])


def give_back(connection: sqlite3.Connection, key: int) -> None:
    """Ends the lease; the epoch stays, so that it only rises."""
    connection.execute("UPDATE leases SET owner = NULL WHERE session = ?", (key,))


def start(connection: sqlite3.Connection, key: int, blob: bytes) -> None:
    """A new journal in the place of one that may be there."""
    clear(connection, key)
    connection.execute(
        "INSERT INTO journal_starts (session, start) VALUES (?, ?)", (key, codec.seal(blob, key))
    )


def append(connection: sqlite3.Connection, key: int, token_ids: Sequence[int]) -> None:
    """Tokens, after those that are there."""
    (last,) = connection.execute(
        "SELECT max(number) FROM journal_tokens WHERE session = ?", (key,)
    ).fetchone()
    number = 0 if last is None else last + 1
    connection.execute(
        "INSERT INTO journal_tokens (session, number, token_ids) VALUES (?, ?, ?)",
        (key, number, codec.seal(rows.tokens_blob(token_ids), key, number)),
    )


def read(connection: sqlite3.Connection, key: int) -> JournalEntry | None:
    """The journal; ValueError where it is damaged."""
    found = connection.execute("SELECT start FROM journal_starts WHERE session = ?", (key,))
    row = found.fetchone()
    if row is None:
        return None
    begun: TurnStart = rows.start_of(codec.unseal(row[0], key))
    tokens: list[int] = []
    for expected, (number, blob) in enumerate(
        connection.execute(
            "SELECT number, token_ids FROM journal_tokens WHERE session = ? ORDER BY number", (key,)
        )
    ):
        if number != expected:
            raise ValueError(f"tokens {expected} of its journal are missing")
        tokens += codec.unpack_tokens(codec.unseal(blob, key, number))
    return JournalEntry(begun, tuple(tokens))


def is_there(connection: sqlite3.Connection, key: int) -> bool:
    """Whether the session has a journal."""
    found = connection.execute("SELECT 1 FROM journal_starts WHERE session = ?", (key,))
    return found.fetchone() is not None


def clear(connection: sqlite3.Connection, key: int) -> None:
    """Empties the journal."""
    connection.execute("DELETE FROM journal_starts WHERE session = ?", (key,))
    connection.execute("DELETE FROM journal_tokens WHERE session = ?", (key,))
