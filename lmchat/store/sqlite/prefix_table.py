"""The prefix table (SQL: `beginnings`): pages of tokens of the transcripts of an owner's sessions.

A row is one page of a turn's transcript. Each page has a mark, a digest of the owner and of all
tokens up to the page's end; a full page is found by its mark alone. Tokens after the last full page
of a branch, and the first tokens of a transcript, are stored beside the mark of the page before
them. Among rows of one mark, sorted by tokens, the longest common prefix is with a neighbour.

Finding what a transcript shares with all others therefore takes one look-up per page. Marks that
are equal by chance (one pair in 2^32 within a range of pages) only make a page seem shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmchat.errors import NotFound
from lmchat.store.prefixes import PAGE, SharedPrefix
from lmchat.store.records import SessionRecord
from lmchat.store.sqlite import codec
from lmchat.store.sqlite.rows import DAMAGE
from lmchat.store.turns import Turn, Unread, common_prefix

Row = tuple[int, int, bytes]
"""(turn, mark, tokens after the marked page; empty for the full page that the mark is of)."""

_WIDTH = codec.FIXED  # bytes of a token
_BYTES = PAGE * _WIDTH
_RANGE = 16  # pages


class _Place(NamedTuple):
    """A turn's parent, prefix length and tokens."""

    parent: int | None
    prefix_length: int
    token_ids: tuple[int, ...]


Place = _Place | Turn | Unread


@dataclass(frozen=True)
class _Chain:
    """A transcript as its number of full pages, their digest, and the bytes of the tokens after."""

    pages: int
    digest: bytes
    range_digest: bytes  # digest at the first of _RANGE pages
    rest: bytes = b""

    @classmethod
    def of_owner(cls, owner: str) -> _Chain:
        digest = _digest(codec.encode(owner))
        return cls(0, digest, digest)

    @property
    def mark(self) -> int:
        """The mark of the last full page.

        The marks of _RANGE pages share their upper half, so their rows are neighbours in the file,
        and deleting a long session changes few pages of the file.
        """
        return int.from_bytes(self.range_digest[:4] + self.digest[-4:], "big", signed=True)

    def grown(self, tokens: bytes) -> Generator[_Chain, None, None]:
        """Yields the chain with more tokens, at each page that becomes full and at the end."""
        chain, rest = self, self.rest + tokens
        for at in range(0, len(rest) - _BYTES + 1, _BYTES):
            digest = _digest(chain.digest + rest[at : at + _BYTES])
            pages = chain.pages + 1
            chain = _Chain(pages, digest, digest if pages % _RANGE == 1 else chain.range_digest)
            yield chain
        suffix = rest[len(rest) // _BYTES * _BYTES :]
        yield _Chain(chain.pages, chain.digest, chain.range_digest, suffix)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class _Tree:
    """The chains of a session's turns.

    Args:
        owner: owner of the session.
        place: returns a turn's place; raises LookupError where there is no such turn.
    """

    def __init__(self, owner: str, place: Callable[[int], Place]) -> None:
        self._place = place
        self._known: dict[int | None, _Chain] = {None: _Chain.of_owner(owner)}

    def rows(self, turn_id: int, is_end: bool) -> list[Row]:
        """Returns the rows of the pages of a turn's transcript that its parent does not have."""
        turn = self._place(turn_id)
        begun = self._cut(turn.parent, turn.prefix_length)
        *full, last = begun.grown(codec.fixed(turn.token_ids))
        self._known[turn_id] = last
        found = {(turn_id, chain.mark, b"") for chain in full}
        if is_end and last.rest:
            found.add((turn_id, last.mark, last.rest))
        if last.pages and not begun.pages:
            first = begun.rest + codec.fixed(turn.token_ids[: PAGE - 1])
            found.add((turn_id, begun.mark, first[: _BYTES - _WIDTH]))
        return sorted(found)

    def end_row(self, turn_id: int) -> Row:
        """Returns the row that a turn has only as the end of a branch."""
        chain = self._chain(turn_id)
        return turn_id, chain.mark, chain.rest

    def _cut(self, turn_id: int | None, prefix_length: int) -> _Chain:
        """Returns the chain of the first `prefix_length` tokens of a turn's transcript."""
        chain = self._chain(turn_id)
        if prefix_length >= chain.pages * PAGE:
            suffix = chain.rest[: (prefix_length - chain.pages * PAGE) * _WIDTH]
            return _Chain(chain.pages, chain.digest, chain.range_digest, suffix)
        return self._made_of(self._tokens(turn_id)[: prefix_length * _WIDTH])

    def _chain(self, turn_id: int | None) -> _Chain:
        if turn_id not in self._known:
            self._known[turn_id] = self._made_of(self._tokens(turn_id))
        return self._known[turn_id]

    def _made_of(self, tokens: bytes) -> _Chain:
        *_, last = self._known[None].grown(tokens)
        return last

    def _tokens(self, turn_id: int | None) -> bytes:
        """Returns the bytes of a turn's transcript."""
        path: list[Place] = []
        while turn_id is not None:
            path.append(self._place(turn_id))
            turn_id = path[-1].parent
        tokens = bytearray()
        for turn in reversed(path):
            del tokens[turn.prefix_length * _WIDTH :]
            tokens += codec.fixed(turn.token_ids)
        return bytes(tokens)


# --- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of the table: rows of new and changed turns, and rows that their parents lose
    because they no longer end a branch."""

    turns: list[int]
    rows: list[Row]
    gone: list[Row]


def change_of(record: SessionRecord, turns: Iterable[Turn]) -> Change:
    """Returns the change for turns of the record, parents first. A turn without its parent has no
    rows."""
    new = {turn.id: turn for turn in turns}
    tree = _Tree(record.owner, lambda turn: new.get(turn) or record.tree.place(turn))
    gone: list[Row] = []
    parents = {turn.parent for turn in new.values()}
    ends = {*record.tree.ends(), *new} - parents
    for parent in parents - new.keys():
        with contextlib.suppress(NotFound):
            gone += [tree.end_row(parent)] if parent is not None else []
    return Change(list(new), _rows(tree, list(new), ends), gone)


def _rows(tree: _Tree, turns: Sequence[int], ends: Collection[int | None]) -> list[Row]:
    found: list[Row] = []
    for turn in turns:
        with contextlib.suppress(LookupError, NotFound):
            found += tree.rows(turn, turn in ends)
    return found


def put(connection: sqlite3.Connection, key: int, change: Change) -> None:
    """Writes the change of a session."""
    connection.executemany(
        "DELETE FROM beginnings WHERE session = ? AND turn = ?",
        ((key, turn) for turn in change.turns),
    )
    connection.executemany(
        "DELETE FROM beginnings WHERE session = ? AND turn = ? AND mark = ? AND tokens = ?",
        ((key, *row) for row in change.gone if row[2]),
    )
    add(connection, key, change.rows)


def add(connection: sqlite3.Connection, key: int, rows: Iterable[Row]) -> None:
    """Inserts the rows of new turns."""
    connection.executemany(
        "INSERT OR IGNORE INTO beginnings (session, turn, mark, tokens) VALUES (?, ?, ?, ?)",
        ((key, *row) for row in rows),
    )


def fill(connection: sqlite3.Connection) -> None:
    """Fills the table of a file of an older version, for damaged sessions as far as possible."""
    for key, owner in connection.execute("SELECT key, owner FROM sessions").fetchall():
        with contextlib.suppress(*DAMAGE):
            add(connection, key, expected(connection, key, codec.decode(owner)))


def _places(connection: sqlite3.Connection, key: int) -> dict[int, Place]:
    """Returns the places of a session's turns, parents first."""
    places: dict[int, Place] = {}
    found = connection.execute(
        "SELECT id, parent, keep, token_ids FROM turns WHERE session = ? ORDER BY position", (key,)
    )
    for turn, parent, prefix_length, tokens in found:
        if parent is None or parent in places:
            places[turn] = _Place(parent, prefix_length, codec.unpack_tokens(tokens))
    return places


def expected(connection: sqlite3.Connection, key: int, owner: str) -> set[Row]:
    """Returns the rows that a session should have."""
    places = _places(connection, key)
    ends = places.keys() - {place.parent for place in places.values()}
    return set(_rows(_Tree(owner, places.__getitem__), list(places), ends))


def is_sound(connection: sqlite3.Connection, key: int) -> bool:
    """Returns whether a session has the rows that it should have.

    True for a read-only file of an older version, which has no such table.
    """
    if connection.execute("PRAGMA table_info (beginnings)").fetchone() is None:
        return True
    owner = _owner(connection, key)
    return owner is None or stored(connection, key) == expected(connection, key, owner)


def repair(connection: sqlite3.Connection, key: int) -> None:
    """Replaces the rows of a session by those that it should have."""
    owner = _owner(connection, key)
    if owner is not None:
        connection.execute("DELETE FROM beginnings WHERE session = ?", (key,))
        add(connection, key, expected(connection, key, owner))


def _owner(connection: sqlite3.Connection, key: int) -> str | None:
    row = connection.execute("SELECT owner FROM sessions WHERE key = ?", (key,)).fetchone()
    return None if row is None else codec.decode(row[0])


def stored(connection: sqlite3.Connection, key: int) -> set[Row]:
    """Returns the rows that a session has."""
    found = connection.execute(
        "SELECT turn, mark, tokens FROM beginnings WHERE session = ?", (key,)
    )
    return set(found)


# --- looking ---------------------------------------------------------------------------------


def common(connection: sqlite3.Connection, owner: str, token_ids: Sequence[int]) -> SharedPrefix:
    """Returns the prefix that a transcript shares with the owner's sessions."""
    found = SharedPrefix()
    tokens = codec.fixed(token_ids)
    chain = _Chain.of_owner(owner)
    found.add(first=_longest(connection, chain.mark, tokens[: _BYTES - _WIDTH]))
    with contextlib.closing(
        chain.grown(tokens)
    ) as pages:  # otherwise Ctrl-C could arrive in its finalizer
        for longer in pages:
            if longer.rest or longer.pages == chain.pages:  # after the full pages
                found.add(last=_longest(connection, longer.mark, longer.rest))
                break
            if not _is_there(connection, longer.mark):
                break
            chain = longer
    found.add(pages=chain.pages)
    suffix = tokens[chain.pages * _BYTES :][: _BYTES - _WIDTH]
    found.ends.update(_ends(connection, chain, suffix))
    return found


def _ends(connection: sqlite3.Connection, chain: _Chain, suffix: bytes) -> Iterator[int]:
    """Yields lengths of branches that end in the page after the chain and start with its tokens."""
    begun = [suffix[:size] for size in range(_WIDTH, len(suffix) + 1, _WIDTH)]
    found = connection.execute(
        "SELECT DISTINCT t.length FROM beginnings AS b "
        "JOIN turns AS t ON t.session = b.session AND t.id = b.turn "
        f"WHERE b.mark = ? AND b.tokens IN ({', '.join('?' * len(begun))}) "
        "AND NOT EXISTS (SELECT 1 FROM turns AS c WHERE c.session = t.session AND c.parent = t.id)",
        (chain.mark, *begun),
    )
    for (length,) in found:
        if length < (chain.pages + 1) * PAGE:  # else it is a prefix of a longer one
            yield length


def _is_there(connection: sqlite3.Connection, mark: int) -> bool:
    row = connection.execute(
        "SELECT 1 FROM beginnings WHERE mark = ? AND tokens = X'' LIMIT 1", (mark,)
    )
    return row.fetchone() is not None


def _longest(connection: sqlite3.Connection, mark: int, tokens: bytes) -> int:
    """Returns the length of the longest prefix of the tokens that a row of the mark has."""
    most = 0
    for neighbour in ("<= ? ORDER BY tokens DESC", ">= ? ORDER BY tokens"):
        row = connection.execute(
            "SELECT tokens FROM beginnings "
            f"WHERE mark = ? AND tokens > X'' AND tokens {neighbour} LIMIT 1",
            (mark, tokens),
        ).fetchone()
        if row is not None and isinstance(row[0], bytes):  # else it is damaged
            most = max(most, common_prefix(tokens, row[0]) // _WIDTH)
    return most
