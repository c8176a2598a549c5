"""The table of tags: which sessions have a tag, in the order of their last use.

Triggers keep it equal to the column `tags` of the sessions, also for processes of older versions.
"""

from __future__ import annotations

import sqlite3

ADD = """INSERT OR IGNORE INTO session_tags (tag, owner, used_at, session)
    SELECT e.value, s.owner, s.used_at, s.key
    FROM sessions AS s,
      json_each(iif(json_valid(CAST(s.tags AS TEXT)), CAST(s.tags AS TEXT), '[]')) AS e
    WHERE e.type = 'text'"""
"""Adds the entries of all sessions. `tags` is a JSON array in a blob; a damaged one has none."""

TABLE = f"""
CREATE TABLE session_tags (
  tag NOT NULL,
  owner NOT NULL,
  used_at INTEGER NOT NULL,
  session INTEGER NOT NULL,
  PRIMARY KEY (tag, owner, used_at, session)
) WITHOUT ROWID;
CREATE INDEX session_tags_by_session ON session_tags (session);
CREATE TRIGGER session_tags_added AFTER INSERT ON sessions BEGIN
  {ADD} AND s.key = new.key;
END;
CREATE TRIGGER session_tags_removed AFTER DELETE ON sessions BEGIN
  DELETE FROM session_tags WHERE session = old.key;
END;
CREATE TRIGGER session_tags_changed AFTER UPDATE OF owner, used_at, tags ON sessions
WHEN old.tags IS NOT new.tags OR old.used_at IS NOT new.used_at OR old.owner IS NOT new.owner BEGIN
  DELETE FROM session_tags WHERE session = old.key;
  {ADD} AND s.key = new.key;
END;
{ADD};
"""


def exists(connection: sqlite3.Connection) -> bool:
    """Returns False for a read-only file of an older version, which has no such table."""
    return connection.execute("PRAGMA table_info (session_tags)").fetchone() is not None


def is_sound(connection: sqlite3.Connection, key: int) -> bool:
    """Returns whether a session has the entries that it should have."""
    if not exists(connection):
        return True
    stored = connection.execute(
        "SELECT tag, owner, used_at FROM session_tags WHERE session = ?", (key,)
    )
    wanted = connection.execute(
        "SELECT e.value, s.owner, s.used_at FROM sessions AS s, "
        "json_each(iif(json_valid(CAST(s.tags AS TEXT)), CAST(s.tags AS TEXT), '[]')) AS e "
        "WHERE e.type = 'text' AND s.key = ?",
        (key,),
    )
    return set(stored) == set(wanted)


def repair(connection: sqlite3.Connection, key: int) -> None:
    """Replaces the entries of a session by those that it should have."""
    connection.execute("DELETE FROM session_tags WHERE session = ?", (key,))
    connection.execute(f"{ADD} AND s.key = ?", (key,))
