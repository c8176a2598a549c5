"""Turns that are being generated, by any process: their transcripts and their pages of KV."""

from __future__ import annotations

import sqlite3

from lmchat.errors import StoreError
from lmchat.store.prefixes import journalled
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite import codec, journal, rows, tables
from lmchat.store.sqlite.database import Database

_MODELS = 64  # sessions used last, whose models a session without a reply may use


def transcripts(connection: sqlite3.Connection, key: int) -> list[list[int]]:
    """Returns the transcript of an unfinished generation. A damaged session has none, because it
    cannot be continued."""
    try:
        row = tables.row_of_key(connection, key)
        if row is None:
            return []
        return journalled(tables.load(connection, row), journal.read(connection, key))
    except (StoreError, *tables.DAMAGE):
        return []


def needed_pages(database: Database) -> set[bytes]:
    """Returns the keys of the pages that running turns need: of their prompts and replies so far.

    Returns an empty set where the store cannot be read.
    """
    found: set[bytes] = set()
    try:
        with database.reading() as connection:
            models = _models(connection)
            for key in journal.begun(connection, None):
                row = tables.row_of_key(connection, key)
                if row is not None:
                    found |= _pages(connection, row, models)
    except (StoreError, *tables.DAMAGE):
        return set()
    return found


def _pages(connection: sqlite3.Connection, row: rows.Row, models: set[str]) -> set[bytes]:
    from turbomind.engine.pages import page_keys

    owner, own = codec.decode(row.owner), codec.decode(row.fingerprint)
    found: set[bytes] = set()
    for ids in _ends(connection, row):
        for model in {own} if own else models:
            found.update(page_keys(model, ids, owner))
    return found


def _ends(connection: sqlite3.Connection, row: rows.Row) -> list[list[int]]:
    """Returns the transcripts that the session's stored pages may end with: the last token of a
    reply has no KV, and a page of the turn before may not be full."""
    running = transcripts(connection, row.key)
    try:
        record: SessionRecord = tables.load(connection, row)
        before = [] if record.leaf is None else [record.tree.token_ids(record.leaf)]
    except StoreError:
        before = []
    return [
        ids[: len(ids) - cut] for ids in (*running, *before) for cut in (0, 1) if len(ids) > cut
    ]


def _models(connection: sqlite3.Connection) -> set[str]:
    found = connection.execute(
        "SELECT fingerprint FROM sessions ORDER BY used_at DESC LIMIT ?", (_MODELS,)
    )
    return {codec.decode(value) for (value,) in found} - {""}
