"""Stores of older versions, written by hand as these wrote them."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from lmchat.store.sqlite import codec, rows

VERSION_1 = """
PRAGMA application_id = 1819108200;
PRAGMA user_version = 1;
CREATE TABLE sessions (key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT
  NOT NULL, name TEXT NOT NULL, revision INTEGER NOT NULL, changed INTEGER NOT NULL, leaf INTEGER,
  pinned INTEGER NOT NULL, created TEXT NOT NULL, last_used TEXT NOT NULL, used_at INTEGER NOT NULL,
  title TEXT NOT NULL, questions INTEGER NOT NULL, tokens INTEGER NOT NULL, size INTEGER NOT NULL,
  tags BLOB NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL, body BLOB NOT NULL,
  checksum INTEGER NOT NULL, UNIQUE (owner, name));
CREATE INDEX sessions_by_use ON sessions (used_at);
CREATE TABLE turns (position INTEGER PRIMARY KEY, session INTEGER NOT NULL, id INTEGER NOT NULL,
  parent INTEGER, revision INTEGER NOT NULL, role TEXT NOT NULL, keep INTEGER NOT NULL, length
  INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL, body BLOB NOT NULL, checksum
  INTEGER NOT NULL, UNIQUE (session, id));
CREATE INDEX turns_by_revision ON turns (session, revision);
CREATE TABLE leases (session INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, owner TEXT);
CREATE TABLE journal_starts (session INTEGER PRIMARY KEY, start BLOB NOT NULL);
CREATE TABLE journal_tokens (session INTEGER NOT NULL, number INTEGER NOT NULL, token_ids BLOB NOT
  NULL, PRIMARY KEY (session, number)) WITHOUT ROWID;
CREATE TABLE notes (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
INSERT INTO sessions VALUES (1, 'abc', 'me', 'old', 5, 5, 2, 0, '2024-05-06T07:08:09+00:00',
  '2024-05-06T07:08:10+00:00', 1714979290000000, 'Good morning', 1, 5, 2, X'5b2278225d', 'm', 'f',
  X'7b22686973746f7279223a226b656570227d', {row});
INSERT INTO turns VALUES (1, 1, 1, NULL, 3, 'user', 0, 2, 'Good morning', X'0201000200', X'7b7d',
  {first});
INSERT INTO turns VALUES (2, 1, 2, 1, 4, 'assistant', 2, 5, 'and you',
  X'04030000000400000005000100', X'7b2266696e6973685f726561736f6e223a2273746f70227d', {second});
INSERT INTO leases VALUES (1, 12, NULL);
"""


def write_version_1(data_dir: Path) -> None:
    """Writes a store of version 1 with one session of two turns."""
    data_dir.mkdir()
    sums = {
        "row": _checksum(2),
        "first": codec.checksum("abc", 1, None, "user", 0, 2, "Good morning", b"\2\1\0\2\0", b"{}"),
        "second": codec.checksum("abc", 2, 1, "assistant", 2, 5, "and you",
                                 b"\4\3\0\0\0\4\0\0\0\5\0\1\0", b'{"finish_reason":"stop"}'),
    }  # fmt: skip
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.executescript(VERSION_1.format(**sums))


WORDS_2 = """
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
PRAGMA user_version = 2;
"""

Added = tuple[int, int, int, tuple[int, ...], str]
"""A turn's id, parent, `prefix_length`, tokens and text."""


def write_version_2(data_dir: Path, added: list[Added]) -> None:
    """Writes a store of version 2: the session of version 1 and more turns."""
    write_version_1(data_dir)
    with contextlib.closing(sqlite3.connect(data_dir / "sessions.db")) as connection:
        connection.executescript(WORDS_2)
        for turn, parent, prefix_length, ids, text in added:
            length, tokens = prefix_length + len(ids), codec.pack_tokens(ids)
            values = (turn, parent, "user", prefix_length, length, text, tokens, b"{}")
            connection.execute(
                "INSERT INTO turns (session, revision, id, parent, role, keep, length, text, "
                "token_ids, body, checksum) VALUES (1, 5, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, rows.turn_checksum("abc", values)),
            )
        connection.execute(
            "UPDATE sessions SET size = size + ?, checksum = ? WHERE key = 1",
            (len(added), _checksum(2 + len(added))),
        )
        connection.commit()


def _checksum(size: int) -> int:
    """Returns the checksum of the session with that many turns."""
    created, used = "2024-05-06T07:08:09+00:00", "2024-05-06T07:08:10+00:00"
    return codec.checksum(
        5, size, "abc", "me", "old", 2, 0, created, used, b'["x"]', "m", "f", 5,
        b'{"history":"keep"}',
    )  # fmt: skip
