"""Sessions and their turns: statements on the tables."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from lmchat.durable import codec, rows
from lmchat.errors import InvalidRequest, NotFound, StoreError
from lmchat.store import SessionRecord
from lmchat.turns import Turn, TurnTree

DAMAGE = (ValueError, TypeError, AttributeError, LookupError)
"""What reading a damaged row raises."""

_TURNS = ", ".join(rows.TURN_COLUMNS)
_SESSIONS = ", ".join(rows.SESSION_COLUMNS)
_PUT_TURN = (
    f"INSERT INTO turns (session, revision, {_TURNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (session, id) DO UPDATE SET revision = excluded.revision, role = excluded.role, "
    "keep = excluded.keep, length = excluded.length, text = excluded.text, "
    "token_ids = excluded.token_ids, body = excluded.body WHERE parent IS excluded.parent"
)
_NUMBERED = re.compile(r"chat-([1-9][0-9]{0,17})")


# --- reading ---------------------------------------------------------------------------------


def row_of(connection: sqlite3.Connection, record: SessionRecord) -> rows.Row:
    """The record's row; NotFound."""
    found = _row(connection, "id = ?", (codec.column(record.id),))
    if found is None:
        raise NotFound(f"no session {record.name!r}")
    return found


def row_named(connection: sqlite3.Connection, owner: str, name: str) -> rows.Row | None:
    """The row of a name, None when there is none."""
    values = (codec.column(owner), codec.column(name))
    return _row(connection, "owner = ? AND name = ?", values)


def _row(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> rows.Row | None:
    found = connection.execute(f"SELECT {rows.READ_COLUMNS} FROM sessions WHERE {where}", values)
    row = found.fetchone()
    return None if row is None else rows.Row(*row)


def row_of_key(connection: sqlite3.Connection, key: int) -> rows.Row | None:
    """The row of a key, None when there is none."""
    return _row(connection, "key = ?", (key,))


def keys(connection: sqlite3.Connection, owner: str | None) -> list[int]:
    """All sessions, or an owner's, the last used first."""
    where, values = ("1", ()) if owner is None else ("owner = ?", (codec.column(owner),))
    found = connection.execute(
        f"SELECT key FROM sessions WHERE {where} ORDER BY used_at DESC, key DESC", values
    )
    return [key for (key,) in found]


def load(connection: sqlite3.Connection, row: rows.Row) -> SessionRecord:
    """The session with its turns. StoreError where its rows are damaged."""
    record = SessionRecord(name="", owner="", history="")
    try:
        row.fill(record)
        record.tree = rows.tree_of(_turns(connection, row.key))
        _check_tree(record, row)
    except DAMAGE as error:
        raise rows.damaged(row.name.decode("utf-8", "replace"), error) from error
    return record


def update(connection: sqlite3.Connection, row: rows.Row, record: SessionRecord) -> None:
    """Brings a record to the row's revision, reading only the turns changed since. StoreError
    where the rows are damaged; the record is as it was then."""
    fresh = SessionRecord(name="", owner="", history="")
    try:
        row.fill(fresh)
        known = record.revision <= row.revision
        turns = _turns(connection, row.key, record.revision) if known else []
        if not known or not _grow(record.tree, turns):
            record.tree = rows.tree_of(_turns(connection, row.key))
        if len(record.tree) > row.size:
            _drop_strangers(connection, row.key, record.tree)
        tree, fresh.tree = record.tree, record.tree
        _check_tree(fresh, row)
    except DAMAGE as error:
        raise rows.damaged(record.name, error) from error
    vars(record).update(vars(fresh))
    record.tree = tree


def _grow(tree: TurnTree, turns: list[Turn]) -> bool:
    """Puts changed and new turns into the tree; False, and nothing done, where they do not fit."""
    new = {turn.id: turn for turn in turns}
    for turn in turns:
        if turn.id in tree and tree.get(turn.id).parent != turn.parent:
            return False
        if turn.parent is not None and turn.parent not in tree and turn.parent not in new:
            return False
    for turn in turns:
        if turn.id in tree:
            tree.replace(turn)
        else:
            rows.check_place(tree, turn)
            tree.adopt(turn)
    return True


def _drop_strangers(connection: sqlite3.Connection, key: int, tree: TurnTree) -> None:
    """Takes out turns that were never kept."""
    kept = {i for (i,) in connection.execute("SELECT id FROM turns WHERE session = ?", (key,))}
    for turn in reversed(list(tree)):
        if turn.id not in kept:
            tree.remove(turn.id)


def _check_tree(record: SessionRecord, row: rows.Row) -> None:
    if len(record.tree) != row.size:
        raise ValueError(f"it has {len(record.tree)} turns, expected {row.size}")
    if record.leaf is not None and record.leaf not in record.tree:
        raise ValueError(f"its last turn, {record.leaf}, is not there")


def _turns(connection: sqlite3.Connection, key: int, since: int | None = None) -> list[Turn]:
    where, values = ("", (key,)) if since is None else ("AND revision > ?", (key, since))
    found = connection.execute(
        f"SELECT {_TURNS} FROM turns WHERE session = ? {where} ORDER BY position", values
    )
    return [rows.turn_of(row) for row in found]


# --- writing ---------------------------------------------------------------------------------


def insert(connection: sqlite3.Connection, record: SessionRecord) -> None:
    """A new session with its turns, as revision 1. InvalidRequest where its name or id is taken."""
    if row_named(connection, record.owner, record.name) is not None:
        raise taken(record.name)
    values = rows.session_values(record)
    if _row(connection, "id = ?", (values["id"],)) is not None:
        raise InvalidRequest(f"session id {record.id!r} is taken, expected a new one")
    values |= {"revision": 1, "changed": 1, "size": len(record.tree)}
    marks = ", ".join("?" * len(rows.SESSION_COLUMNS))
    added = connection.execute(
        f"INSERT INTO sessions ({_SESSIONS}) VALUES ({marks})",
        [values[column] for column in rows.SESSION_COLUMNS],
    )
    assert added.lastrowid is not None
    put_turns(connection, added.lastrowid, 1, [rows.turn_values(turn) for turn in record.tree])


def taken(name: str) -> InvalidRequest:
    """What to say when a name is."""
    return InvalidRequest(f"session name {name!r} is taken, expected a new one")


def free_number(connection: sqlite3.Connection, owner: str) -> int:
    """One above the owner's highest "chat-N"."""
    found = connection.execute(
        "SELECT name FROM sessions WHERE owner = ? AND name >= 'chat-' AND name < 'chat.'",
        (codec.column(owner),),
    )
    matches = (_NUMBERED.fullmatch(name.decode("utf-8", "replace")) for (name,) in found)
    return 1 + max((int(match[1]) for match in matches if match), default=0)


def write(
    connection: sqlite3.Connection,
    row: rows.Row,
    values: dict[str, Any],
    turns: Sequence[tuple[Any, ...]],
) -> int:
    """The session's fields and turns that are new or changed; the new revision. `values` are its
    columns; what it is called is left to `rename()`."""
    revision = row.revision + 1
    put_turns(connection, row.key, revision, turns)
    leaf = values["leaf"]
    if leaf is not None and not _has_turn(connection, row.key, leaf):
        raise StoreError(f"turn {leaf} cannot be the last one: it was never kept")
    size = "(SELECT count(*) FROM turns WHERE session = ?)" if turns else "size"
    columns = [name for name in values if name not in ("id", "owner", "name")]
    connection.execute(
        f"UPDATE sessions SET revision = ?, changed = ?, size = {size}, "
        f"{', '.join(f'{name} = ?' for name in columns)} WHERE key = ?",
        [revision, revision, *([row.key] if turns else []), *(values[c] for c in columns), row.key],
    )
    return revision


def put_turns(
    connection: sqlite3.Connection, key: int, revision: int, turns: Iterable[tuple[Any, ...]]
) -> None:
    """Turns by their columns, parents before their children."""
    for turn in turns:
        turn_id, parent = turn[:2]
        if parent is not None and not _has_turn(connection, key, parent):
            raise StoreError(f"turn {turn_id} hangs under turn {parent}, which was never kept")
        if connection.execute(_PUT_TURN, (key, revision, *turn)).rowcount != 1:
            raise StoreError(f"turn {turn_id} cannot move to parent {parent}")


def _has_turn(connection: sqlite3.Connection, key: int, turn: int) -> bool:
    found = connection.execute("SELECT 1 FROM turns WHERE session = ? AND id = ?", (key, turn))
    return found.fetchone() is not None


def rename(connection: sqlite3.Connection, row: rows.Row, name: str) -> int:
    """Gives the session another name; the new revision."""
    connection.execute(
        "UPDATE sessions SET name = ?, revision = revision + 1 WHERE key = ?",
        (codec.column(name), row.key),
    )
    return row.revision + 1


def delete(connection: sqlite3.Connection, key: int) -> None:
    """Removes all of a session."""
    for table in ("journal_starts", "journal_tokens", "leases", "turns"):
        connection.execute(f"DELETE FROM {table} WHERE session = ?", (key,))
    connection.execute("DELETE FROM sessions WHERE key = ?", (key,))
