"""The tables of the store and how an older file becomes one of today.

A new file goes through all migrations too, so there is one way to make a table. Each is one
transaction together with the version it leads to.

Nothing in the file may need a function of ours: a process of an older version that has the file
open goes on with it, and so does the `sqlite3` of a user.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from lmchat.errors import StoreError
from lmchat.store.sqlite import codec, prefix_table, requests, tags

# `key` and `position` are SQLite's row numbers. `changed` is the revision of the last change other
# than a rename, which makes no writer stale. `title`, `questions` and `tokens` are of the current
# branch, for lists; `size` counts all turns. `used_at` is `last_used` in microseconds, to sort by.
# `checksum` and what the journal's blobs begin with detect a damaged row: a flipped bit of a
# token would otherwise be another token.
_TABLES = """
CREATE TABLE sessions (
  key INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  owner TEXT NOT NULL,
  name TEXT NOT NULL,
  revision INTEGER NOT NULL,
  changed INTEGER NOT NULL,
  leaf INTEGER,
  pinned INTEGER NOT NULL,
  created TEXT NOT NULL,
  last_used TEXT NOT NULL,
  used_at INTEGER NOT NULL,
  title TEXT NOT NULL,
  questions INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  size INTEGER NOT NULL,
  tags BLOB NOT NULL,
  model TEXT NOT NULL,
  fingerprint TEXT NOT NULL,
  body BLOB NOT NULL,
  checksum INTEGER NOT NULL,
  UNIQUE (owner, name)
);
CREATE INDEX sessions_by_use ON sessions (used_at);

CREATE TABLE turns (
  position INTEGER PRIMARY KEY,
  session INTEGER NOT NULL,
  id INTEGER NOT NULL,
  parent INTEGER,
  revision INTEGER NOT NULL,
  role TEXT NOT NULL,
  keep INTEGER NOT NULL,
  length INTEGER NOT NULL,
  text TEXT NOT NULL,
  token_ids BLOB NOT NULL,
  body BLOB NOT NULL,
  checksum INTEGER NOT NULL,
  UNIQUE (session, id)
);
CREATE INDEX turns_by_revision ON turns (session, revision);

CREATE TABLE leases (
  session INTEGER PRIMARY KEY,
  epoch INTEGER NOT NULL,
  owner TEXT
);
CREATE TABLE journal_starts (
  session INTEGER PRIMARY KEY,
  start BLOB NOT NULL
);
CREATE TABLE journal_tokens (
  session INTEGER NOT NULL,
  number INTEGER NOT NULL,
  token_ids BLOB NOT NULL,
  PRIMARY KEY (session, number)
) WITHOUT ROWID;

CREATE TABLE notes (
  key TEXT PRIMARY KEY,
  value BLOB NOT NULL
) WITHOUT ROWID;
"""

# The full-text index has its content in the tables; triggers keep both consistent.
_WORDS = """
CREATE VIRTUAL TABLE turn_words USING fts5(
  text, content='turns', content_rowid='position', tokenize='unicode61 remove_diacritics 2'
);
CREATE TRIGGER turns_added AFTER INSERT ON turns BEGIN
  INSERT INTO turn_words (rowid, text) VALUES (new.position, new.text);
END;
CREATE TRIGGER turns_removed AFTER DELETE ON turns BEGIN
  INSERT INTO turn_words (turn_words, rowid, text) VALUES ('delete', old.position, old.text);
END;
CREATE TRIGGER turns_changed AFTER UPDATE OF text ON turns WHEN old.text IS NOT new.text BEGIN
  INSERT INTO turn_words (turn_words, rowid, text) VALUES ('delete', old.position, old.text);
  INSERT INTO turn_words (rowid, text) VALUES (new.position, new.text);
END;

CREATE VIRTUAL TABLE session_words USING fts5(
  name, title, content='sessions', content_rowid='key', tokenize='unicode61 remove_diacritics 2'
);
CREATE TRIGGER sessions_added AFTER INSERT ON sessions BEGIN
  INSERT INTO session_words (rowid, name, title) VALUES (new.key, new.name, new.title);
END;
CREATE TRIGGER sessions_removed AFTER DELETE ON sessions BEGIN
  INSERT INTO session_words (session_words, rowid, name, title)
    VALUES ('delete', old.key, old.name, old.title);
END;
CREATE TRIGGER sessions_changed AFTER UPDATE OF name, title ON sessions
WHEN old.name IS NOT new.name OR old.title IS NOT new.title BEGIN
  INSERT INTO session_words (session_words, rowid, name, title)
    VALUES ('delete', old.key, old.name, old.title);
  INSERT INTO session_words (rowid, name, title) VALUES (new.key, new.name, new.title);
END;

INSERT INTO turn_words (turn_words) VALUES ('rebuild');
INSERT INTO session_words (session_words) VALUES ('rebuild');
"""

# The prefix table; `prefix_table.py` describes its rows.
_PREFIX_TABLE = """
CREATE TABLE beginnings (
  mark INTEGER NOT NULL,
  tokens BLOB NOT NULL,
  session INTEGER NOT NULL,
  turn INTEGER NOT NULL,
  PRIMARY KEY (mark, tokens, session, turn)
) WITHOUT ROWID;
CREATE INDEX beginnings_by_turn ON beginnings (session, turn);
CREATE TRIGGER turns_begin_nothing AFTER DELETE ON turns BEGIN
  DELETE FROM beginnings WHERE session = old.session AND turn = old.id;
END;
"""

# The index knows words between spaces. Where others are in a text, it stands once more as the index
# is to see it, in the column that ends with `_words`.
_SEPARATED = """
DROP TRIGGER turns_added;
DROP TRIGGER turns_removed;
DROP TRIGGER turns_changed;
DROP TRIGGER sessions_added;
DROP TRIGGER sessions_removed;
DROP TRIGGER sessions_changed;
DROP TABLE turn_words;
DROP TABLE session_words;
ALTER TABLE turns ADD COLUMN text_words TEXT;
ALTER TABLE sessions ADD COLUMN name_words TEXT;
ALTER TABLE sessions ADD COLUMN title_words TEXT;
"""
_INDEX_SEPARATED = """
CREATE VIEW turn_texts AS
  SELECT position, coalesce(text_words, text) AS text FROM turns;
CREATE VIRTUAL TABLE turn_words USING fts5(
  text, content='turn_texts', content_rowid='position', tokenize='unicode61 remove_diacritics 2'
);
CREATE TRIGGER turns_added AFTER INSERT ON turns BEGIN
  INSERT INTO turn_words (rowid, text)
    VALUES (new.position, coalesce(new.text_words, new.text));
END;
CREATE TRIGGER turns_removed AFTER DELETE ON turns BEGIN
  INSERT INTO turn_words (turn_words, rowid, text)
    VALUES ('delete', old.position, coalesce(old.text_words, old.text));
END;
CREATE TRIGGER turns_changed AFTER UPDATE OF text, text_words ON turns
WHEN old.text IS NOT new.text OR old.text_words IS NOT new.text_words BEGIN
  INSERT INTO turn_words (turn_words, rowid, text)
    VALUES ('delete', old.position, coalesce(old.text_words, old.text));
  INSERT INTO turn_words (rowid, text)
    VALUES (new.position, coalesce(new.text_words, new.text));
END;

CREATE VIEW session_texts AS
  SELECT key, coalesce(name_words, name) AS name, coalesce(title_words, title) AS title
  FROM sessions;
CREATE VIRTUAL TABLE session_words USING fts5(
  name, title, content='session_texts', content_rowid='key',
  tokenize='unicode61 remove_diacritics 2'
);
CREATE TRIGGER sessions_added AFTER INSERT ON sessions BEGIN
  INSERT INTO session_words (rowid, name, title) VALUES (
    new.key, coalesce(new.name_words, new.name), coalesce(new.title_words, new.title));
END;
CREATE TRIGGER sessions_removed AFTER DELETE ON sessions BEGIN
  INSERT INTO session_words (session_words, rowid, name, title) VALUES (
    'delete', old.key, coalesce(old.name_words, old.name), coalesce(old.title_words, old.title));
END;
CREATE TRIGGER sessions_changed AFTER UPDATE OF name, title, name_words, title_words ON sessions
WHEN old.name IS NOT new.name OR old.title IS NOT new.title
  OR old.name_words IS NOT new.name_words OR old.title_words IS NOT new.title_words BEGIN
  INSERT INTO session_words (session_words, rowid, name, title) VALUES (
    'delete', old.key, coalesce(old.name_words, old.name), coalesce(old.title_words, old.title));
  INSERT INTO session_words (rowid, name, title) VALUES (
    new.key, coalesce(new.name_words, new.name), coalesce(new.title_words, new.title));
END;

INSERT INTO turn_words (turn_words) VALUES ('rebuild');
INSERT INTO session_words (session_words) VALUES ('rebuild');
"""
_AT_A_TIME = 256  # rows whose texts are in memory


def _separate(connection: sqlite3.Connection) -> None:
    """Fills the columns of separated words."""
    for table, key, columns in (
        ("turns", "position", ["text"]),
        ("sessions", "key", ["name", "title"]),
    ):
        last = 0
        while True:
            found = connection.execute(
                f"SELECT {key}, {', '.join(columns)} FROM {table} WHERE {key} > ? "
                f"ORDER BY {key} LIMIT {_AT_A_TIME}",
                (last,),
            ).fetchall()
            if not found:
                break
            last = found[-1][0]
            for at, column in enumerate(columns, 1):
                made = [(codec.words_column(row[at]), row[0]) for row in found]
                connection.executemany(
                    f"UPDATE {table} SET {column}_words = ? WHERE {key} = ?",
                    [pair for pair in made if pair[0] is not None],
                )


# Requests of other processes to stop a turn, with the fencing token of its lease.
_STOPS = """
CREATE TABLE stops (
  session INTEGER PRIMARY KEY,
  epoch INTEGER NOT NULL
);
"""

NUMBER = "CAST(substr(name, 6) AS INTEGER)"
IS_NUMBERED = (
    "name GLOB 'chat-[1-9]*' AND NOT name GLOB 'chat-*[^0-9]*' AND length(name) BETWEEN 6 AND 23"
)
"""The N of a session named "chat-N", and the condition that it is one. The index
`sessions_by_number` has both, so they never change."""

# For lists of an owner's sessions, and to number a new one. Lists by tag have a table of their own.
_LISTS = f"""
CREATE INDEX sessions_by_owner ON sessions (owner, used_at);
CREATE INDEX sessions_by_number ON sessions (owner, {NUMBER}) WHERE {IS_NUMBERED};
"""

Step = str | Callable[[sqlite3.Connection], None]

MIGRATIONS: tuple[tuple[Step, ...], ...] = (
    (_TABLES,),
    (_WORDS,),
    (_PREFIX_TABLE, prefix_table.fill),
    (_SEPARATED, _separate, _INDEX_SEPARATED),
    (_LISTS, tags.TABLE),
    (_STOPS,),
    (requests.TABLE,),
)
"""Statements and work that lead from version i to version i + 1; 0 is an empty file."""

READABLE = 2
"""The oldest version that can be read without migration, where the file cannot be written. Only its
prefix table and its tables of tags, of requests to stop and of requests of clients are missing."""

WAIT_SECONDS = 300.0
"""Longest wait, in seconds, for another process that migrates a large file."""

APPLICATION = 0x6C6D6368
"""SQLite's application_id of a store of sessions."""


def migrate(
    connection: sqlite3.Connection, migrations: tuple[tuple[Step, ...], ...] = MIGRATIONS
) -> None:
    """Migrates the file to the newest version.

    Raises StoreError for a newer version, and for another file.
    """
    if _version(connection, len(migrations)) == len(migrations):
        return
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {WAIT_SECONDS * 1000:.0f}")
    try:
        _migrate(connection, migrations)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {patience}")


def check_readable(connection: sqlite3.Connection) -> None:
    """Checks that a read-only file can be read without migration.

    Raises sqlite3.OperationalError where it needs one, StoreError as `migrate()`.
    """
    version = _version(connection, len(MIGRATIONS))
    if version < READABLE:
        raise sqlite3.OperationalError(f"version {version} cannot be read as it is")


def _migrate(connection: sqlite3.Connection, migrations: tuple[tuple[Step, ...], ...]) -> None:
    for _ in migrations:
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _version(connection, len(migrations))  # another process may have migrated it
            if version < len(migrations):
                for step in migrations[version]:
                    _do(connection, step)
                connection.execute(f"PRAGMA user_version = {version + 1}")
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _do(connection: sqlite3.Connection, step: Step) -> None:
    if isinstance(step, str):
        for statement in _statements(step):
            connection.execute(statement)
    else:
        step(connection)


def _version(connection: sqlite3.Connection, newest: int) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION:
        raise StoreError("the file is a database, but not one of sessions")
    if version < 0:
        raise StoreError(f"the file is damaged: its version is {version}, expected 0 to {newest}")
    if version > newest:
        raise StoreError(
            f"the file is of version {version}, expected at most {newest}: a newer "
            "lmchat wrote it; use that one"
        )
    return int(version)


def _statements(script: str) -> list[str]:
    found, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    assert not statement.strip(), statement
    return found
