"""Removal of deleted words from the full-text index.

A deletion only adds entries that hide the old ones: words stay in the file until the index has
been merged.
"""

from __future__ import annotations

import sqlite3

TABLES = ("turn_words", "session_words")
"""The tables of the index."""

_PAGES = 64  # of 4 KiB, that a step writes: other transactions wait for it
_NOTE = "deleted"  # key of the note that the index has words of deleted sessions


def note_deletion(connection: sqlite3.Connection) -> None:
    """Notes, with a deletion, that the index is to be merged, also by a later process."""
    connection.execute("INSERT OR IGNORE INTO notes (key, value) VALUES (?, x'')", (_NOTE,))


def is_noted(connection: sqlite3.Connection) -> bool:
    """Returns whether words of deleted sessions may be in the index."""
    found = connection.execute("SELECT 1 FROM notes WHERE key = ?", (_NOTE,))
    return found.fetchone() is not None


def forget(connection: sqlite3.Connection) -> bool:
    """Does a step of the merge, which leaves out deleted words.

    Returns:
        Whether there is more to do.
    """
    more = False
    for table in TABLES:
        before = connection.total_changes
        # A negative number merges all parts of the index into one, in as many steps as needed.
        connection.execute(f"INSERT INTO {table} ({table}, rank) VALUES ('merge', ?)", (-_PAGES,))
        more = more or connection.total_changes - before >= 2
    if not more:
        connection.execute("DELETE FROM notes WHERE key = ?", (_NOTE,))
    return more
