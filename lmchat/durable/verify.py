"""Looks at everything a store holds and says what is wrong with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

from lmchat.durable import beginnings, codec, journal, rows, tables
from lmchat.durable.database import Database
from lmchat.errors import StoreError

Progress = Callable[[int, int], None]
_WORDS = ("turn_words", "session_words")


def problems(database: Database, progress: Progress | None = None) -> list[str]:
    """What is wrong with the file, its search index and each session; empty when all is well.
    `progress` gets the sessions that were looked at and their number."""
    try:
        found = _file(database)
        with database.reading() as connection:
            every = tables.keys(connection, None)
    except StoreError as error:
        return [str(error)]
    for done, key in enumerate(every, 1):
        try:
            with database.reading() as connection:
                found += _session(connection, key)
        except StoreError as error:
            found.append(str(error))
        if progress is not None:
            progress(done, len(every))
    return found


def _file(database: Database) -> list[str]:
    with database.reading() as connection:
        said = [text.decode() for (text,) in connection.execute("PRAGMA integrity_check")]
    found = [f"the file: {text}" for text in said if text != "ok"]
    for words in _WORDS if database.can_write else ():
        try:
            with database.writing(durable=False) as connection:
                connection.execute(
                    f"INSERT INTO {words} ({words}, rank) VALUES ('integrity-check', 1)"
                )
        except StoreError as error:
            found.append(f"the search index {words}: {error}")
    return found


def _session(connection: sqlite3.Connection, key: int) -> Iterator[str]:
    row = tables.row_of_key(connection, key)
    if row is None:
        return  # deleted meanwhile
    record = tables.load(connection, row)
    list(record.tree)  # reads each turn
    try:
        entry = journal.read(connection, key)
        damage = entry.damage if entry else ""
    except tables.DAMAGE as error:
        damage = str(error)
    if damage:
        yield f"session {record.name!r}: its journal is damaged: {damage}"
    if beginnings.kept(connection, key) != beginnings.expected(connection, key, record.owner):
        yield f"session {record.name!r}: its pages are not in the table of beginnings as they are"
    columns = ("title", "questions", "tokens")
    found = connection.execute(f"SELECT {', '.join(columns)} FROM sessions WHERE key = ?", (key,))
    values = rows.session_values(record)
    for name, value in zip(columns, found.fetchone(), strict=True):
        shown = codec.decode(value) if isinstance(value, bytes) else value
        if codec.column(shown) != values[name] if isinstance(shown, str) else shown != values[name]:
            yield f"session {record.name!r}: {name} is {shown!r}, expected {values[name]!r}"
