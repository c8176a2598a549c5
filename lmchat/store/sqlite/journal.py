"""Leases, and what a generation keeps before its turn is acknowledged: statements on the tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from lmchat.store.records import JournalEntry, Lease
from lmchat.store.sqlite import codec, rows, tables

_FAR = 1 << 48  # epochs that no session comes to


def holder(connection: sqlite3.Connection, key: int) -> tuple[int, str | None]:
    """The session's last epoch (0: none yet) and the owner of its lease. A damaged lease is
    nobody's, and the next epoch is above all that were."""
    found = connection.execute("SELECT epoch, owner FROM leases WHERE session = ?", (key,))
    epoch, owner = found.fetchone() or (0, None)
    if not isinstance(epoch, int) or not 0 <= epoch <= _FAR:
        return _FAR, None
    return epoch, owner.decode("utf-8", "replace") if epoch and isinstance(owner, bytes) else None


def lend(connection: sqlite3.Connection, key: int, owner: str) -> int:
    """Gives the lease to an owner; its epoch."""
    epoch = holder(connection, key)[0] + 1
    connection.execute(
        "INSERT INTO leases (session, epoch, owner) VALUES (?, ?, ?) "
        "ON CONFLICT (session) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner",
        (key, epoch, owner),
    )
    return epoch


def mark_new(connection: sqlite3.Connection, key: int, owner: str) -> None:
    """Nothing was done with the session yet but to make it: until then epoch 0 has its maker. No
    lease, it keeps nobody out."""
    connection.execute("INSERT INTO leases (session, epoch, owner) VALUES (?, 0, ?)", (key, owner))


def unmark(connection: sqlite3.Connection, key: int) -> None:
    """Somebody has done something with the session."""
    connection.execute("UPDATE leases SET owner = NULL WHERE session = ? AND epoch = 0", (key,))


def unmark_all(connection: sqlite3.Connection, owner: str) -> None:
    """The maker of new sessions ends in order: what is left of them is meant to be."""
    connection.execute("UPDATE leases SET owner = NULL WHERE owner = ? AND epoch = 0", (owner,))


def new_ones(connection: sqlite3.Connection, owner: str) -> list[tuple[int, str]]:
    """The new sessions of a person, and their makers."""
    found = connection.execute(
        "SELECT s.key, l.owner FROM leases AS l JOIN sessions AS s ON s.key = l.session "
        "WHERE l.epoch = 0 AND length(l.owner) = 32 AND s.owner = ?",  # a token, not damage
        (codec.column(owner),),
    )
    return [(key, codec.decode(maker)) for key, maker in found]


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
    """Tokens, after those that are there; those that come after the journal was emptied are gone
    with it."""
    (last,) = connection.execute(
        "SELECT max(number) FROM journal_tokens WHERE session = ?", (key,)
    ).fetchone()
    number = 0 if last is None else last + 1
    connection.execute(
        "INSERT INTO journal_tokens (session, number, token_ids) SELECT ?, ?, ? "
        "WHERE EXISTS (SELECT 1 FROM journal_starts WHERE session = ?)",
        (key, number, codec.seal(rows.tokens_blob(token_ids), key, number), key),
    )


def read(connection: sqlite3.Connection, key: int) -> JournalEntry | None:
    """The journal, as far as it can be read. ValueError for one of a newer version."""
    found = connection.execute("SELECT start FROM journal_starts WHERE session = ?", (key,))
    row = found.fetchone()
    tokens = connection.execute(
        "SELECT number, token_ids FROM journal_tokens WHERE session = ? ORDER BY number", (key,)
    )
    if row is None:
        return JournalEntry(None, (), "its beginning is missing") if tokens.fetchone() else None
    try:
        begun = rows.start_of(codec.unseal(row[0], key))
    except rows.Newer:
        raise
    except tables.DAMAGE as error:
        return JournalEntry(None, (), f"its beginning cannot be read: {error}")
    return JournalEntry(begun, *_readable(key, tokens))


def _readable(key: int, found: Iterable[tuple[int, bytes]]) -> tuple[tuple[int, ...], str]:
    """The tokens before any damage, and what that is."""
    tokens: list[int] = []
    for expected, (number, blob) in enumerate(found):
        if number != expected:
            return tuple(tokens), f"tokens {expected} of its journal are missing"
        try:
            tokens += codec.unpack_tokens(codec.unseal(blob, key, number))
        except tables.DAMAGE as error:
            return tuple(tokens), f"tokens {expected} of its journal cannot be read: {error}"
    return tuple(tokens), ""


def is_there(connection: sqlite3.Connection, key: int) -> bool:
    """Whether the session has a journal."""
    found = connection.execute("SELECT 1 FROM journal_starts WHERE session = ?", (key,))
    return found.fetchone() is not None


def begun(connection: sqlite3.Connection, owner: str) -> list[int]:
    """The sessions of a person that have one."""
    found = connection.execute(
        "SELECT s.key FROM journal_starts AS j JOIN sessions AS s ON s.key = j.session "
        "WHERE s.owner = ?",
        (codec.column(owner),),
    )
    return [key for (key,) in found]


def clear(connection: sqlite3.Connection, key: int) -> None:
    """Empties the journal."""
    connection.execute("DELETE FROM journal_starts WHERE session = ?", (key,))
    connection.execute("DELETE FROM journal_tokens WHERE session = ?", (key,))
