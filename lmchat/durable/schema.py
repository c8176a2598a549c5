"""The tables of the store and how an older file becomes one of today.

A new file goes through all migrations too, so there is one way to make a table. Each is one
transaction together with the version it leads to.
"""

from __future__ import annotations

import sqlite3

from lmchat.errors import StoreError

# `key` and `position` are SQLite's row numbers. `changed` is the revision of the last change other
# than a rename, which makes no writer stale. `title`, `questions` and `tokens` are of the current
# branch, for lists; `size` counts all turns. `used_at` is `last_used` in microseconds, to sort by.
# `checksum` and what the journal's blobs begin with tell a damaged row, as a flipped bit of a token
# would otherwise be a token.
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

# The words lie in an index beside the texts, which are stored once; triggers keep both together.
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

MIGRATIONS: tuple[str, ...] = (_TABLES, _WORDS)
"""Statements that lead from version i to version i + 1; 0 is an empty file."""

APPLICATION = 0x6C6D6368
"""Marks a file as a store of sessions, for `file` and for us."""


def migrate(connection: sqlite3.Connection, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Brings the file to the newest version. StoreError for a newer one and for a file that is
    something else."""
    if _version(connection, len(migrations)) == len(migrations):
        return
    for _ in migrations:
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _version(connection, len(migrations))  # another process may be faster
            if version < len(migrations):
                for statement in _statements(migrations[version]):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


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
