"""Leases, and the journal of generations whose turn is not acknowledged yet: SQL statements."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence

from lmchat.store.records import JournalEntry, Lease
from lmchat.store.sqlite import codec, rows, tables

_FAR = 1 << 48  # above all fencing tokens that a session can reach


def holder(connection: sqlite3.Connection, key: int) -> tuple[int, str | None]:
    """Returns the session's last fencing token (0: none yet) and the owner of its lease.

    A damaged lease has no owner, and the next fencing token is above all earlier ones.
    """
    found = connection.execute("SELECT epoch, owner FROM leases WHERE session = ?", (key,))
    token, owner = found.fetchone() or (0, None)
    if not isinstance(token, int) or not 0 <= token <= _FAR:
        return _FAR, None
    return token, owner.decode("utf-8", "replace") if token and isinstance(owner, bytes) else None


def acquire(connection: sqlite3.Connection, key: int, owner: str) -> int:
    """Gives the lease to an owner and returns its fencing token."""
    token = holder(connection, key)[0] + 1
    connection.execute(
        "INSERT INTO leases (session, epoch, owner) VALUES (?, ?, ?) "
        "ON CONFLICT (session) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner",
        (key, token, owner),
    )
    return token


def mark_new(connection: sqlite3.Connection, key: int, owner: str) -> None:
    """Marks a session as created and not used since.

    Fencing token 0 then names its creator. This is no lease and excludes no other process.
    """
    connection.execute("INSERT INTO leases (session, epoch, owner) VALUES (?, 0, ?)", (key, owner))


def unmark(connection: sqlite3.Connection, key: int) -> None:
    """Removes the mark of a session that is used."""
    connection.execute("UPDATE leases SET owner = NULL WHERE session = ? AND epoch = 0", (key,))


def unmark_all(connection: sqlite3.Connection, owner: str) -> None:
    """Removes the marks of a creator that ends in order: its new sessions stay."""
    connection.execute("UPDATE leases SET owner = NULL WHERE owner = ? AND epoch = 0", (owner,))


def new_ones(connection: sqlite3.Connection, owner: str) -> list[tuple[int, str]]:
    """Returns the keys of an owner's sessions that are marked as new, and their creators."""
    found = connection.execute(
        "SELECT s.key, l.owner FROM leases AS l JOIN sessions AS s ON s.key = l.session "
        "WHERE l.epoch = 0 AND length(l.owner) = 32 AND s.owner = ?",  # a token, not damage
        (codec.column(owner),),
    )
    return [(key, codec.decode(maker)) for key, maker in found]


def held(connection: sqlite3.Connection, lease: Lease, owner: str) -> int | None:
    """Returns the key of the lease's session, None where the lease is not its newest."""
    found = connection.execute(
        "SELECT s.key FROM sessions AS s JOIN leases AS l ON l.session = s.key "
        "WHERE s.id = ? AND l.epoch = ? AND l.owner = ?",
        (codec.column(lease.session), lease.fencing_token, owner),
    ).fetchone()
    return None if found is None else int(found[0])


def release(connection: sqlite3.Connection, key: int) -> None:
    """Ends the lease. The fencing token stays, so that it only rises."""
    connection.execute("UPDATE leases SET owner = NULL WHERE session = ?", (key,))


def start(connection: sqlite3.Connection, key: int, blob: bytes) -> None:
    """A new journal in the place of one that may be there."""
    clear(connection, key)
    connection.execute(
        "INSERT INTO journal_starts (session, start) VALUES (?, ?)", (key, codec.seal(blob, key))
    )


def append(connection: sqlite3.Connection, key: int, token_ids: Sequence[int]) -> None:
    """Tokens, after those that are there; those that come after the journal was emptied are gone
    with it."""
    (last,) = connection.execute(
        "SELECT max(number) FROM journal_tokens WHERE session = ?", (key,)
    ).fetchone()
    number = 0 if last is None else last + 1
    connection.execute(
        "INSERT INTO journal_tokens (session, number, token_ids, at) SELECT ?, ?, ?, ? "
        "WHERE EXISTS (SELECT 1 FROM journal_starts WHERE session = ?)",
        (key, number, codec.seal(rows.tokens_blob(token_ids), key, number), int(time.time()), key),
    )


def read(connection: sqlite3.Connection, key: int, skip: int = 0) -> JournalEntry | None:
    """Returns the journal as far as it can be read, without its first `skip` entries, or None.

    Raises ValueError for a journal of a newer version.
    """
    found = connection.execute("SELECT start FROM journal_starts WHERE session = ?", (key,))
    row = found.fetchone()
    tokens = connection.execute(
        "SELECT number, token_ids FROM journal_tokens WHERE session = ? AND number >= ? "
        "ORDER BY number",
        (key, skip),
    )
    if row is None:
        return JournalEntry(None, (), "its start is missing") if tokens.fetchone() else None
    try:
        begun = rows.start_of(codec.unseal(row[0], key))
    except rows.Newer:
        raise
    except tables.DAMAGE as error:
        return JournalEntry(None, (), f"its start cannot be read: {error}")
    ids, damage, entries = _readable(key, tokens, skip)
    return JournalEntry(begun, ids, damage, entries=entries)


def _readable(
    key: int, found: Iterable[tuple[int, bytes]], skip: int
) -> tuple[tuple[int, ...], str, int]:
    """Returns the tokens before any damage, a description of the damage, and the number of entries
    before it."""
    tokens: list[int] = []
    expected = skip
    for number, blob in found:
        if number != expected:
            return tuple(tokens), f"tokens {expected} of its journal are missing", expected
        try:
            tokens += codec.unpack_tokens(codec.unseal(blob, key, number))
        except tables.DAMAGE as error:
            damage = f"tokens {expected} of its journal cannot be read: {error}"
            return tuple(tokens), damage, expected
        expected += 1
    return tuple(tokens), "", expected


def is_there(connection: sqlite3.Connection, key: int) -> bool:
    """Returns whether the session has a journal."""
    found = connection.execute("SELECT 1 FROM journal_starts WHERE session = ?", (key,))
    return found.fetchone() is not None


def begun(connection: sqlite3.Connection, owner: str | None) -> list[int]:
    """Returns the keys of an owner's sessions that have a journal, or of all sessions."""
    where, values = ("1", ()) if owner is None else ("s.owner = ?", (codec.column(owner),))
    found = connection.execute(
        "SELECT s.key FROM journal_starts AS j JOIN sessions AS s ON s.key = j.session "
        f"WHERE {where}",
        values,
    )
    return [key for (key,) in found]


def request_stop(connection: sqlite3.Connection, key: int, fencing_token: int) -> None:
    """Asks the owner of this lease to stop its turn. Does nothing once the turn has ended."""
    connection.execute(
        "INSERT OR REPLACE INTO stops (session, epoch) SELECT l.session, l.epoch FROM leases AS l "
        "JOIN journal_starts AS j ON j.session = l.session WHERE l.session = ? AND l.epoch = ?",
        (key, fencing_token),
    )


def stops(connection: sqlite3.Connection, owner: str) -> list[Lease]:
    """Returns the leases of an owner whose turns other processes have asked to stop."""
    found = connection.execute(
        "SELECT s.id, l.epoch FROM stops AS t JOIN leases AS l USING (session, epoch) "
        "JOIN sessions AS s ON s.key = t.session WHERE l.owner = ?",
        (owner,),
    )
    return [Lease(codec.decode(session), token) for session, token in found]


def clear(connection: sqlite3.Connection, key: int) -> None:
    """Empties the journal."""
    connection.execute("DELETE FROM stops WHERE session = ?", (key,))
    connection.execute("DELETE FROM journal_starts WHERE session = ?", (key,))
    connection.execute("DELETE FROM journal_tokens WHERE session = ?", (key,))
