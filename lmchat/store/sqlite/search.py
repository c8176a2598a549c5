"""Lists of sessions, and full-text search in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from lmchat.store.protocol import no_session
from lmchat.store.records import Summary, shortened
from lmchat.store.sqlite import codec, journal, tags
from lmchat.store.sqlite.tables import DAMAGE
from lmchat.store.words import is_separated, joined, matches, may_have_marks, separated

_COLUMNS = (
    "s.key, s.id, s.name, s.owner, s.title, s.tags, s.questions, s.tokens, s.pinned, s.created, "
    "s.last_used, s.used_at, s.model, s.fingerprint, s.revision, s.body, l.epoch, l.owner, "
    "EXISTS (SELECT 1 FROM journal_starts AS j WHERE j.session = s.key)"
)
_FROM = "sessions AS s LEFT JOIN leases AS l ON l.session = s.key"
_FROM_TAGS = (
    "session_tags AS t CROSS JOIN sessions AS s ON s.key = t.session "
    "LEFT JOIN leases AS l ON l.session = s.key"
)
_TEXTS = {
    "session_words": ("name, title", "key", "sessions"),
    "turn_words": ("text", "position", "turns"),
}
"""Columns, key and table of each full-text index."""
_SNIPPET_WORDS = 16
_SNIPPET_CHARACTERS = 48  # where the snippet is in characters


class Tags(NamedTuple):
    """The tags that sessions of a list must have and must not have; None: any."""

    wanted: str | None = None
    unwanted: str | None = None


class Lists:
    """Reads lists through one connection. `busy` describes the living owner of a lease, if any."""

    def __init__(self, connection: sqlite3.Connection, busy: Callable[[str], str]) -> None:
        self._connection = connection
        self._busy = busy

    def newest(
        self, owner: str | None, chosen: Tags, limit: int | None, after: str | None = None
    ) -> list[Summary]:
        """Returns summaries, the last used first. Raises NotFound for an unknown `after`."""
        where, values = _owned(owner)
        tag = chosen.wanted
        indexed = tag is not None and tags.exists(self._connection)
        columns = "t.used_at, t.session" if indexed else "s.used_at, s.key"
        source, order = _FROM, ", ".join(f"{column} DESC" for column in columns.split(", "))
        if indexed:
            source = _FROM_TAGS
            where, values = where.replace("s.owner", "t.owner"), (codec.column(tag or ""), *values)
            where = f"t.tag = ? AND {where}"
        if after is not None:
            where += f" AND ({columns}) < (?, ?)"
            values = (*values, *self._place(after, owner))
        if chosen.unwanted is not None and tags.exists(self._connection):
            where += (
                " AND NOT EXISTS (SELECT 1 FROM session_tags WHERE session = s.key AND tag = ?)"
            )
            values = (*values, codec.column(chosen.unwanted))
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM {source} WHERE {where} ORDER BY {order}", values
        )
        return _first((self._summary(row) for row in rows if self._counts(row)), chosen, limit)

    def _place(self, session_id: str, owner: str | None) -> tuple[int, int]:
        """Returns `used_at` and the key of the owner's session of this id. Raises NotFound."""
        where, values = _owned(owner)
        found: tuple[int, int] | None = self._connection.execute(
            f"SELECT s.used_at, s.key FROM sessions AS s WHERE s.id = ? AND {where}",
            (codec.column(session_id), *values),
        ).fetchone()
        if found is None:
            raise no_session(session_id)
        return found

    def found(
        self,
        text: str,
        owner: str | None,
        chosen: Tags,
        limit: int | None,
        after: str | None = None,
    ) -> list[Summary]:
        """Returns sessions with all words of `text` in name and title, then in one message. Raises
        NotFound for an `after` that is not among them."""
        match = match_of(text)
        if not match:
            return []
        exact = text if may_have_marks(text) else ""
        last = None if after is None else self._place(after, owner)[1]
        return _first(self._matches(match, exact, owner, last, after), chosen, limit)

    def _matches(
        self, match: str, exact: str, owner: str | None, last: int | None, after: str | None
    ) -> Iterator[Summary]:
        where, values = _owned(owner)
        seen = set()
        for key, words, row in self._hits(match, where, values):
            if key not in seen and (not exact or matches(self._text(words, row), exact)):
                seen.add(key)
                if last is not None:
                    last = None if key == last else last
                    continue
                snippet = self._snippet(words, match, row)
                (columns,) = self._connection.execute(
                    f"SELECT {_COLUMNS} FROM {_FROM} WHERE s.key = ?", (key,)
                ).fetchall()
                if self._counts(columns):
                    yield self._summary(columns, snippet)
        if last is not None:
            raise no_session(after or "")

    def _hits(
        self, match: str, where: str, values: tuple[Any, ...]
    ) -> Iterator[tuple[int, str, int]]:
        """Returns (session, index with the words, row of it), the best first."""
        titles = self._connection.execute(
            "SELECT s.key FROM session_words JOIN sessions AS s ON s.key = session_words.rowid "
            f"WHERE session_words MATCH ? AND {where} ORDER BY bm25(session_words), s.used_at DESC",
            (match, *values),
        ).fetchall()
        yield from ((key, "session_words", key) for (key,) in titles)
        turns = self._connection.execute(
            "SELECT s.key, t.position FROM turn_words JOIN turns AS t "
            "ON t.position = turn_words.rowid JOIN sessions AS s ON s.key = t.session "
            f"WHERE turn_words MATCH ? AND {where} ORDER BY bm25(turn_words), s.used_at DESC",
            (match, *values),
        )
        yield from ((key, "turn_words", position) for key, position in turns)

    def _text(self, words: str, row: int) -> str:
        """Returns the text of a row of an index."""
        texts, key, table = _TEXTS[words]
        found = self._connection.execute(f"SELECT {texts} FROM {table} WHERE {key} = ?", (row,))
        return "\n".join(map(_lenient, found.fetchone()))

    def _snippet(self, words: str, match: str, row: int) -> str:
        found = ""
        for size in (_SNIPPET_WORDS, _SNIPPET_CHARACTERS):
            made = self._connection.execute(
                f"SELECT CAST(snippet({words}, -1, '', '', '…', {size}) AS BLOB) "
                f"FROM {words} WHERE {words} MATCH ? AND rowid = ?",
                (match, row),
            ).fetchone()
            found = _lenient(made[0]) if made else ""
            if not is_separated(found):
                break
        return " ".join(joined(found).split())

    def _counts(self, row: tuple[Any, ...]) -> bool:
        """Returns whether the session is more than an unused one of a dead process."""
        *_, epoch, maker, _journal = row
        try:
            return epoch != 0 or maker is None or bool(self._busy(codec.decode(maker)))
        except DAMAGE:
            return True

    def _summary(self, row: tuple[Any, ...], snippet: str = "") -> Summary:
        (key, session, name, owner, title, tags, questions, tokens, pinned, created, last_used,
         used_at, model, fingerprint, revision, body, epoch, holder, has_journal) = row  # fmt: skip
        try:
            found = Summary(
                id=codec.decode(session),
                name=codec.decode(name),
                owner=codec.decode(owner),
                title=codec.decode(title),
                tags=tuple(codec.loads(tags)),
                turns=int(questions),
                tokens=int(tokens),
                pinned=bool(pinned),
                created=datetime.fromisoformat(codec.decode(created)),
                last_used=datetime.fromisoformat(codec.decode(last_used)),
                model=codec.decode(model),
                fingerprint=codec.decode(fingerprint),
                busy=self._busy(codec.decode(holder)) if epoch and holder is not None else "",
                snippet=snippet,
                revision=int(revision),
                metadata=codec.loads(body).get("metadata", {}) if b'"metadata"' in body else {},
            )
        except DAMAGE:
            return _damaged(session, name, owner, used_at)
        return self._with_journal(found, key) if has_journal else found

    def _with_journal(self, found: Summary, key: int) -> Summary:
        """Returns the counts with the journalled reply. A damaged journal counts nothing."""
        try:
            entry = journal.read(self._connection, key)
        except DAMAGE:
            return found
        if entry is None or entry.start is None:
            return found
        start, user = entry.start, entry.start.user
        questions = self._questions(key, start.parent)
        return replace(
            found,
            title=found.title or (shortened(user.text) if user else ""),
            turns=found.turns if questions is None else questions + (user is not None),
            tokens=start.prefix_length + len(user.token_ids if user else ()) + len(entry.token_ids),
        )

    def _questions(self, key: int, turn: int | None) -> int | None:
        """Returns the number of questions up to a turn; None for a missing turn."""
        if turn is None:
            return 0
        count, last = self._connection.execute(
            "WITH RECURSIVE path (id, parent, role) AS ("
            "SELECT id, parent, role FROM turns WHERE session = :key AND id = :turn UNION "
            "SELECT t.id, t.parent, t.role FROM turns AS t JOIN path ON t.id = path.parent "
            "WHERE t.session = :key) "
            "SELECT count(*) FILTER (WHERE role = 'user'), count(*) FROM path",
            {"key": key, "turn": turn},
        ).fetchone()
        return int(count) if last else None


def _damaged(session: object, name: object, owner: object, used_at: object) -> Summary:
    """Returns what a damaged session still shows, so that it does not hide the others."""
    try:
        moment = datetime.fromtimestamp(used_at / 1e6, timezone.utc)  # type: ignore[operator]
    except (TypeError, ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(0, timezone.utc)
    return Summary(
        id=_lenient(session),
        name=_lenient(name),
        owner=_lenient(owner),
        title="(damaged)",
        tags=(),
        turns=0,
        tokens=0,
        pinned=False,
        created=moment,
        last_used=moment,
        model="",
        fingerprint="",
    )


def _lenient(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def match_of(text: str) -> str:
    """Returns the query for all words of a text; a word that ends with `*` is a prefix.

    Nothing in the text is query syntax. Empty where the text has no word.
    """
    terms = []
    for word in text.replace("\0", " ").split():
        plain = word.rstrip("*").replace('"', " ").encode("utf-8", "replace").decode()
        if any(character.isalnum() for character in plain):
            terms.append(f'"{separated(plain) or plain}"' + ("*" if word.endswith("*") else ""))
    return " ".join(terms)


def _owned(owner: str | None) -> tuple[str, tuple[Any, ...]]:
    return ("1", ()) if owner is None else ("s.owner = ?", (codec.column(owner),))


def _first(found: Iterator[Summary], tags: Tags, limit: int | None) -> list[Summary]:
    chosen: list[Summary] = []
    for summary in found:
        if limit is not None and len(chosen) >= limit:
            break
        if tags.wanted not in (None, *summary.tags) or tags.unwanted in summary.tags:
            continue
        chosen.append(summary)
    return chosen
