"""Sessions and their turns: statements on the tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from lmchat.errors import NotFound, StoreError
from lmchat.store.protocol import taken
from lmchat.store.records import SessionRecord, not_before, now
from lmchat.store.sqlite import codec, prefix_table, rows, schema, search_index
from lmchat.store.sqlite.rows import UnreadTurn
from lmchat.store.turns import Turn, TurnTree
from turbomind.params import wrong

DAMAGE = rows.DAMAGE

_TURNS = ", ".join(rows.TURN_COLUMNS)
_SESSIONS = ", ".join(rows.SESSION_COLUMNS)
_ADD_TURN = (
    f"INSERT INTO turns (session, revision, {_TURNS}, checksum, text_words) "
    f"VALUES ({', '.join('?' * (len(rows.TURN_COLUMNS) + 4))})"
)
_PUT_TURN = (
    f"{_ADD_TURN} ON CONFLICT (session, id) DO UPDATE SET revision = excluded.revision, "
    "role = excluded.role, keep = excluded.keep, length = excluded.length, text = excluded.text, "
    "token_ids = excluded.token_ids, body = excluded.body, checksum = excluded.checksum, "
    "text_words = excluded.text_words "
    "WHERE parent IS excluded.parent"
)
_TEXT = rows.TURN_COLUMNS.index("text")


# --- reading ---------------------------------------------------------------------------------


def row_of(connection: sqlite3.Connection, record: SessionRecord) -> rows.Row:
    """Returns the record's row. Raises NotFound, and StoreError where the row is damaged."""
    found = any_row_of(connection, record)
    found.check()
    return found


def any_row_of(connection: sqlite3.Connection, record: SessionRecord) -> rows.Row:
    """Returns the record's row, damaged or not. Raises NotFound."""
    found = _row(connection, "id = ?", (codec.column(record.id),))
    if found is None:
        raise NotFound(f"no session {record.name!r}")
    return found


def row_of_id(connection: sqlite3.Connection, owner: str, session_id: str) -> rows.Row | None:
    """Returns the row of an owner's session, or None."""
    values = (codec.column(session_id), codec.column(owner))
    return _row(connection, "id = ? AND owner = ?", values)


def row_named(connection: sqlite3.Connection, owner: str, name: str) -> rows.Row | None:
    """Returns the row of a name, or None."""
    values = (codec.column(owner), codec.column(name))
    return _row(connection, "owner = ? AND name = ?", values)


def _row(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> rows.Row | None:
    found = connection.execute(f"SELECT {rows.READ_COLUMNS} FROM sessions WHERE {where}", values)
    row = found.fetchone()
    return None if row is None else rows.Row(*row)


def row_of_key(connection: sqlite3.Connection, key: int) -> rows.Row | None:
    """Returns the row of a key, or None."""
    return _row(connection, "key = ?", (key,))


def keys(connection: sqlite3.Connection, owner: str | None) -> list[int]:
    """Returns the keys of all sessions, or of one owner's, the last used first."""
    where, values = ("1", ()) if owner is None else ("owner = ?", (codec.column(owner),))
    found = connection.execute(
        f"SELECT key FROM sessions WHERE {where} ORDER BY used_at DESC, key DESC", values
    )
    return [key for (key,) in found]


def count(connection: sqlite3.Connection, owner: str) -> int:
    """Returns the number of an owner's sessions."""
    found = connection.execute(
        "SELECT count(*) FROM sessions WHERE owner = ?", [codec.column(owner)]
    )
    return int(found.fetchone()[0])


def load(connection: sqlite3.Connection, row: rows.Row) -> SessionRecord:
    """Returns the session with its turns. Raises StoreError where its rows are damaged."""
    try:
        return _checked(row, rows.tree_of(_turns(connection, row)))
    except DAMAGE as error:
        raise rows.damaged(row.shown_name, error) from error


def updated(connection: sqlite3.Connection, row: rows.Row, record: SessionRecord) -> SessionRecord:
    """Returns the session at the row's revision, reading only the turns changed since the record's.

    Raises StoreError where the rows are damaged.
    """
    try:
        tree = None
        if record.revision <= row.revision:
            turns = _turns(connection, row, record.revision)
            tree = _grown(record.tree, [turn.turn() for _, turn in turns])
        if tree is None or len(tree) != row.size:
            tree = rows.tree_of(_turns(connection, row))
        return _checked(row, tree)
    except DAMAGE as error:
        raise rows.damaged(record.name, error) from error


def _grown(tree: TurnTree, turns: list[Turn]) -> TurnTree | None:
    """Returns the tree with changed and new turns, or None where they do not fit."""
    lengths: dict[int | None, int] = {None: 0}
    for turn in turns:
        if turn.id in tree and tree.place(turn.id).parent != turn.parent:
            return None
        if turn.parent is not None and turn.parent not in lengths:
            if turn.parent not in tree:
                return None
            lengths[turn.parent] = tree.get(turn.parent).length
        if turn.id not in tree:
            rows.check_place(turn.id, turn, lengths[turn.parent])
        lengths[turn.id] = turn.length
    return tree.with_turns(turns)


def _checked(row: rows.Row, tree: TurnTree) -> SessionRecord:
    record = row.record(tree)
    _check_tree(record, row)
    return record


def _check_tree(record: SessionRecord, row: rows.Row) -> None:
    if len(record.tree) != row.size:
        raise ValueError(f"it has {len(record.tree)} turns, expected {row.size}")
    if record.leaf is not None and record.leaf not in record.tree:
        raise ValueError(f"its last turn, {record.leaf}, is not there")


def _turns(
    connection: sqlite3.Connection, session: rows.Row, since: int | None = None
) -> list[tuple[int, UnreadTurn]]:
    key = session.key
    where, values = ("", (key,)) if since is None else ("AND revision > ?", (key, since))
    found = connection.execute(
        f"SELECT {_TURNS}, checksum FROM turns WHERE session = ? {where} ORDER BY position", values
    )
    return rows.unread(session, found.fetchall())


# --- writing ---------------------------------------------------------------------------------


def newest_use(connection: sqlite3.Connection) -> datetime | None:
    """Returns the latest `last_used` of all sessions, None where there is none or it is damaged."""
    found = connection.execute("SELECT used_at FROM sessions ORDER BY used_at DESC LIMIT 1")
    newest = next(iter(found.fetchone() or ()), None)
    try:
        return rows.moment_of(newest) if isinstance(newest, int) else None
    except OverflowError:
        return None


def used(connection: sqlite3.Connection, row: rows.Row, record: SessionRecord) -> SessionRecord:
    """Returns the record with a last use after those of all sessions, if it has a new one.

    So lists are in the order of use, also where another process has seen a later clock.
    """
    if codec.decode(row.last_used) == record.last_used.isoformat():
        return record
    newest = newest_use(connection)
    if newest is None or newest < record.last_used:
        return record
    not_before(newest)
    return replace(record, last_used=now())


def insert(connection: sqlite3.Connection, record: SessionRecord) -> int:
    """Inserts a new session with its turns as revision 1 and returns its key.

    Raises InvalidRequest where the name or the id is taken.
    """
    if row_named(connection, record.owner, record.name) is not None:
        raise taken(record.name)
    values = rows.session_values(record)
    if _row(connection, "id = ?", (values["id"],)) is not None:
        raise wrong("id", record.id, "one that is not taken")
    values |= {"revision": 1, "changed": 1, "size": len(record.tree)}
    values["checksum"] = rows.session_checksum(values)
    marks = ", ".join("?" * len(rows.SESSION_COLUMNS))
    added = connection.execute(
        f"INSERT INTO sessions ({_SESSIONS}) VALUES ({marks})",
        [values[column] for column in rows.SESSION_COLUMNS],
    )
    assert added.lastrowid is not None
    _add_turns(connection, added.lastrowid, values["id"], record.tree)
    begun = prefix_table.change_of(record, record.tree)
    prefix_table.add(connection, added.lastrowid, begun.rows)
    check_stored(connection, added.lastrowid, record.leaf)
    return added.lastrowid


def _add_turns(
    connection: sqlite3.Connection, key: int, session: str | bytes, tree: TurnTree
) -> None:
    """Inserts all turns of a new session in one statement: a fork may have hundreds."""
    found: list[tuple[Any, ...]] = []
    seen: set[int | None] = {None}
    for turn in tree:
        if turn.parent not in seen:
            raise _orphaned(turn.id, turn.parent)
        seen.add(turn.id)
        values = rows.turn_values(turn)
        checksum = rows.turn_checksum(session, values)
        found.append((key, 1, *values, checksum, codec.words_column(values[_TEXT])))
    connection.executemany(_ADD_TURN, found)


def free_number(connection: sqlite3.Connection, owner: str) -> int:
    """Returns the number after the owner's highest "chat-N", which an index has."""
    found = connection.execute(
        f"SELECT {schema.NUMBER} FROM sessions WHERE owner = ? AND {schema.IS_NUMBERED} "
        f"ORDER BY {schema.NUMBER} DESC LIMIT 1",
        (codec.column(owner),),
    ).fetchone()
    return 1 if found is None else 1 + int(found[0])


def write(
    connection: sqlite3.Connection,
    row: rows.Row,
    values: dict[str, Any],
    turns: Sequence[tuple[Any, ...]],
    begun: prefix_table.Change,
) -> int:
    """Writes a session's columns, its new and changed turns, and the change of its prefix table.

    The name is left to `rename()`. Returns the new revision.
    """
    revision = row.revision + 1
    new = put_turns(connection, row.key, row.id, revision, turns)
    prefix_table.put(connection, row.key, begun)
    check_stored(connection, row.key, values["leaf"])
    values = {
        **values, "id": row.id, "owner": row.owner, "name": row.name, "revision": revision,
        "changed": revision, "size": row.size + new,
    }  # fmt: skip
    values["checksum"] = rows.session_checksum(values)
    columns = [name for name in values if name not in ("id", "owner", "name", "name_words")]
    connection.execute(
        f"UPDATE sessions SET {', '.join(f'{name} = ?' for name in columns)} WHERE key = ?",
        [*(values[name] for name in columns), row.key],
    )
    return revision


def put_turns(
    connection: sqlite3.Connection,
    key: int,
    session: str | bytes,
    revision: int,
    turns: Iterable[tuple[Any, ...]],
) -> int:
    """Writes turns, parents before their children. Returns how many of them are new."""
    new = 0
    for turn in turns:
        turn_id, parent = turn[:2]
        new += not _has_turn(connection, key, turn_id)
        if parent is not None and not _has_turn(connection, key, parent):
            raise _orphaned(turn_id, parent)
        checksum = rows.turn_checksum(session, turn)
        columns = (key, revision, *turn, checksum, codec.words_column(turn[_TEXT]))
        if connection.execute(_PUT_TURN, columns).rowcount != 1:
            raise StoreError(f"turn {turn_id} cannot move to parent {parent}")
    return new


def _orphaned(turn: int, parent: int | None) -> StoreError:
    return StoreError(f"turn {turn} has the parent {parent}, which is not in the store")


def check_stored(connection: sqlite3.Connection, key: int, *turns: int | None) -> None:
    """Raises StoreError for a turn that is not in the store."""
    for turn in turns:
        if turn is not None and not _has_turn(connection, key, turn):
            raise StoreError(f"turn {turn} is not in the store, expected one of the session's")


def _has_turn(connection: sqlite3.Connection, key: int, turn: int) -> bool:
    found = connection.execute("SELECT 1 FROM turns WHERE session = ? AND id = ?", (key, turn))
    return found.fetchone() is not None


def rename(connection: sqlite3.Connection, row: rows.Row, name: str) -> int:
    """Renames the session and returns its new revision."""
    values = {**vars(row), "name": codec.column(name), "revision": row.revision + 1}
    connection.execute(
        "UPDATE sessions SET name = ?, name_words = ?, revision = ?, checksum = ? WHERE key = ?",
        (
            values["name"],
            codec.words_column(values["name"]),
            values["revision"],
            rows.session_checksum(values),
            row.key,
        ),
    )
    return row.revision + 1


def delete(connection: sqlite3.Connection, key: int) -> None:
    """Deletes all rows of a session, and notes that its words are to leave the search index."""
    search_index.note_deletion(connection)
    for table in ("journal_starts", "journal_tokens", "leases", "stops", "turns"):
        connection.execute(f"DELETE FROM {table} WHERE session = ?", (key,))
    connection.execute("DELETE FROM sessions WHERE key = ?", (key,))
