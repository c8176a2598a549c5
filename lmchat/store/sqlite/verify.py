"""Verification of a store: its file, search index, sessions and prefix table."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

from lmchat.errors import StoreError
from lmchat.store.sqlite import codec, journal, prefix_table, rows, search_index, tables, tags
from lmchat.store.sqlite.database import Database

Progress = Callable[[int, int], None]


def problems(database: Database, progress: Progress | None = None) -> list[str]:
    """Returns one sentence per problem of the file, its search index and each session.

    Args:
        database: the store's file.
        progress: called with the number of verified sessions and of all sessions.
    """
    try:
        found = _file(database)
        with database.reading() as connection:
            every = tables.keys(connection, None)
    except StoreError as error:
        return [str(error)]
    for done, key in enumerate(every, 1):
        try:
            with database.reading() as connection:
                row = tables.row_of_key(connection, key)
                found += _session(connection, row) if row else []  # else deleted meanwhile
                is_whole = prefix_table.is_sound(connection, key)
                is_tagged = tags.is_sound(connection, key)
            if row and not is_tagged:
                found.append(_tagged_again(database, row.shown_name, key))
            if row and not is_whole:
                found.append(_repaired(database, row.shown_name, key))
        except (StoreError, *tables.DAMAGE) as error:
            found.append(str(error))
        if progress is not None:
            progress(done, len(every))
    return found


def _file(database: Database) -> list[str]:
    with database.reading() as connection:
        said = [text.decode() for (text,) in connection.execute("PRAGMA integrity_check")]
    found = [f"the file: {text}" for text in said if text != "ok"]
    for words in search_index.TABLES if database.can_write else ():
        try:
            with database.writing(durable=False) as connection:
                connection.execute(
                    f"INSERT INTO {words} ({words}, rank) VALUES ('integrity-check', 1)"
                )
        except StoreError as error:
            found.append(f"the search index {words}: {error}")
    return found


def _repaired(database: Database, name: str, key: int) -> str:
    """Repairs the prefix table of a session and returns the problem as a sentence.

    The table follows from the turns. Damage, or a process of an older version, makes them differ.
    """
    found = f"session {name!r}: the prefix table does not match its turns"
    if not database.can_write:
        return found
    with database.writing() as connection:
        prefix_table.repair(connection, key)
    return f"{found}; it was repaired"


def _tagged_again(database: Database, name: str, key: int) -> str:
    """Repairs the entries of a session in the table of tags and returns the problem."""
    found = f"session {name!r}: the table of tags does not match its tags"
    if not database.can_write:
        return found
    with database.writing() as connection:
        tags.repair(connection, key)
    return f"{found}; it was repaired"


def _session(connection: sqlite3.Connection, row: rows.Row) -> Iterator[str]:
    key = row.key
    record = tables.load(connection, row)
    list(record.tree)  # reads each turn
    try:
        entry = journal.read(connection, key)
        damage = entry.damage if entry else ""
    except tables.DAMAGE as error:
        damage = str(error)
    if damage:
        yield f"session {record.name!r}: its journal is damaged: {damage}"
    columns = ("title", "questions", "tokens")
    found = connection.execute(f"SELECT {', '.join(columns)} FROM sessions WHERE key = ?", (key,))
    values = rows.session_values(record)
    for name, value in zip(columns, found.fetchone(), strict=True):
        shown = codec.decode(value) if isinstance(value, bytes) else value
        if codec.column(shown) != values[name] if isinstance(shown, str) else shown != values[name]:
            yield f"session {record.name!r}: {name} is {shown!r}, expected {values[name]!r}"
