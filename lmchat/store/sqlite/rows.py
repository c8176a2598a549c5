"""Sessions and turns as rows of the tables, and back.

Fields that lists and searches read have their own columns. All other fields that differ from their
defaults are one JSON value, `body`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from lmchat import errors
from lmchat.errors import Error, InvalidRequest, StoreError, with_public
from lmchat.store.records import SessionRecord, TurnStart
from lmchat.store.sqlite import codec
from lmchat.store.turns import Timings, Turn, TurnTree, Usage

SESSION_COLUMNS = (
    "id", "owner", "name", "revision", "changed", "leaf", "pinned", "created", "last_used",
    "used_at", "title", "questions", "tokens", "size", "tags", "model", "fingerprint", "body",
    "checksum", "name_words", "title_words",
)  # fmt: skip
TURN_COLUMNS = ("id", "parent", "role", "keep", "length", "text", "token_ids", "body")
_RECORD_COLUMNS = (
    "id", "owner", "name", "leaf", "pinned", "created", "last_used", "tags", "model", "fingerprint",
    "revision",
)  # fmt: skip
_CHECKED = ("changed", "size", *_RECORD_COLUMNS, "body")
READ_COLUMNS = ", ".join(("key", *_CHECKED, "checksum"))
"""The columns of `Row`, in order."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ENCODED = "_encoded"  # an attribute beside the fields of a turn, so `replace()` leaves it out
DAMAGE = (ValueError, TypeError, AttributeError, LookupError)
"""Errors that reading a damaged row raises."""

_ERRORS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
_PARTS = {"usage": Usage, "timings": Timings}

_STORED_HISTORY = {"append": "keep"}
_STORED_NAMES = {"prefix_length": "keep"}  # the names of fields in rows, where they differ
"""The rule for earlier turns as rows spell it, where that differs from `SessionRecord.history`."""
_HISTORY = {stored: rule for rule, stored in _STORED_HISTORY.items()}


# --- writing ---------------------------------------------------------------------------------


def session_values(record: SessionRecord) -> dict[str, Any]:
    """Returns a session's columns except `revision`, `changed`, `size` and `checksum`.

    Raises InvalidRequest for a field that cannot be stored.
    """
    path = record.tree.path(record.leaf)
    title = record.title
    return {
        "id": codec.column(record.id),
        "owner": codec.column(record.owner),
        "name": codec.column(record.name),
        "name_words": codec.words_column(record.name),
        "leaf": record.leaf,
        "pinned": int(record.pinned),
        "created": record.created.isoformat(),
        **use_values(record.last_used),
        "title": codec.column(title),
        "title_words": codec.words_column(title),
        "questions": sum(turn.role == "user" for turn in path),
        "tokens": path[-1].length if path else 0,
        "tags": _dumps("tags", list(record.tags)),
        "model": codec.column(record.model),
        "fingerprint": codec.column(record.fingerprint),
        "body": _body(record, (*_RECORD_COLUMNS, "tree")),
    }


def session_checksum(values: Mapping[str, Any]) -> int:
    """Returns the checksum of a session's columns, without those that only lists show."""
    return codec.checksum(*(values[name] for name in _CHECKED))


def turn_checksum(session: str | bytes, values: Sequence[Any]) -> int:
    """Returns `codec.checksum()` of the TURN_COLUMNS of a turn in the session with this id.

    Computed in one call, because it is a large part of the time to read a long session.
    """
    turn_id, parent, role, prefix_length, length, text, tokens, body = values
    owner, role, text = (
        codec.encode(value) if isinstance(value, str) else value for value in (session, role, text)
    )
    return zlib.crc32(
        b"%d:%b%a;%a;%d:%b%a;%a;%d:%b%d:%b%d:%b"
        % (len(owner), owner, turn_id, parent, len(role), role, prefix_length, length,
           len(text), text, len(tokens), tokens, len(body), body)
    )  # fmt: skip


def use_values(moment: datetime) -> dict[str, Any]:
    """Returns the columns of the last use, of which `used_at` sorts."""
    return {"last_used": moment.isoformat(), "used_at": microseconds(moment)}


def microseconds(moment: datetime) -> int:
    """Returns microseconds since 1970, to sort by."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def moment_of(microseconds: int) -> datetime:
    """Returns the time of `microseconds()`. Raises OverflowError beyond the year 9999."""
    return _EPOCH + timedelta(microseconds=microseconds)


def turn_values(turn: Turn) -> tuple[Any, ...]:
    """Returns the TURN_COLUMNS of a turn.

    They are cached in the turn, which never changes: a fork writes all its turns again.
    Raises InvalidRequest for a field that cannot be stored.
    """
    known: tuple[Any, ...] | None = vars(turn).get(_ENCODED)
    if known is None:
        known = vars(turn)[_ENCODED] = _encoded(turn)
    return known


def _encoded(turn: Turn) -> tuple[Any, ...]:
    expected = turn.prefix_length + len(turn.token_ids)
    if turn.prefix_length < 0 or turn.length != expected:
        raise InvalidRequest(
            f"turn {turn.id} is {turn.length} tokens long, expected {expected}: a prefix of "
            f"{turn.prefix_length} and its own {len(turn.token_ids)}"
        )
    return (
        turn.id,
        turn.parent,
        codec.column(turn.role),
        turn.prefix_length,
        turn.length,
        codec.column(turn.text),
        tokens_blob(turn.token_ids),
        _body(turn, TURN_COLUMNS),
    )


def tokens_blob(token_ids: Iterable[int]) -> bytes:
    """Returns token ids as bytes. Raises InvalidRequest for values that are no ids."""
    try:
        return codec.pack_tokens(token_ids)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def start_blob(start: TurnStart) -> bytes:
    """Returns the start of a generation as bytes."""
    values = dict(_fields(start, ()))
    if start.user is not None:
        values["user"] = _turn_list(start.user)
    if start.past:
        values["past"] = [_turn_list(turn) for turn in start.past]
    return _dumps("start", values)


def _turn_list(turn: Turn) -> list[Any]:
    *columns, tokens, body = turn_values(turn)
    columns = [codec.decode(v) if isinstance(v, bytes) else v for v in columns]
    return [*columns, list(codec.unpack_tokens(tokens)), codec.loads(body)]


def _body(item: SessionRecord | Turn, columns: Sequence[str]) -> bytes:
    values: dict[str, Any] = {}
    for name, value in _fields(item, columns):
        if name == "error":
            values[name] = [type(value).__name__, str(value)]
        elif name in _PARTS:
            values[name] = dict(_fields(value, ()))
        elif name == "history":
            values[name] = _STORED_HISTORY.get(value, value)
        else:
            values[name] = value
    if isinstance(item, Turn) and list(item.message.items()) == _plain_message(item):
        del values["message"]
    return _dumps("the session" if isinstance(item, SessionRecord) else f"turn {item.id}", values)


def _plain_message(turn: Turn) -> list[tuple[str, Any]]:
    return [("role", turn.role), ("content", turn.text)]


def _fields(item: Any, without: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Returns the fields that differ from their defaults, by their names in rows."""
    for name, default in _defaults(item.__class__):
        stored = _STORED_NAMES.get(name, name)
        if stored not in without:
            value = getattr(item, name)
            if type(value) is not type(default) or value != default:
                yield stored, value


def _names_in_rows(kind: type[Any]) -> list[str]:
    """Returns the names of a dataclass's fields as rows have them."""
    return [_STORED_NAMES.get(field.name, field.name) for field in dataclasses.fields(kind)]


@functools.cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a dataclass and their defaults."""

    def default(field: dataclasses.Field[Any]) -> Any:
        factory = field.default_factory
        return field.default if factory is dataclasses.MISSING else factory()

    return tuple((field.name, default(field)) for field in dataclasses.fields(kind))


def _dumps(what: str, value: object) -> bytes:
    try:
        return codec.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be stored: {error}") from None


# --- reading ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """A session's row. `body` and other values are still bytes."""

    key: int
    changed: int
    size: int
    id: bytes
    owner: bytes
    name: bytes
    leaf: int | None
    pinned: int
    created: bytes
    last_used: bytes
    tags: bytes
    model: bytes
    fingerprint: bytes
    revision: int
    body: bytes
    checksum: int

    def check(self) -> None:
        """Raises StoreError where the checksum does not match."""
        if session_checksum(vars(self)) != self.checksum:
            raise damaged(self.shown_name, ValueError("the checksum of its row is wrong"))

    @property
    def shown_name(self) -> str:
        """The session's name, as far as a damaged row allows."""
        return self.name.decode("utf-8", "replace") if isinstance(self.name, bytes) else "?"

    def record(self, tree: TurnTree) -> SessionRecord:
        """Returns the session with a tree of turns.

        Raises StoreError for a damaged row, ValueError for one of a newer version.
        """
        self.check()
        body = codec.loads(self.body)
        known = {field.name for field in dataclasses.fields(SessionRecord)}
        check_known(body, known - {*_RECORD_COLUMNS, "tree"})
        history = body.pop("history", "")
        return SessionRecord(
            history=_HISTORY.get(history, history),
            id=codec.decode(self.id),
            owner=codec.decode(self.owner),
            name=codec.decode(self.name),
            tree=tree,
            leaf=self.leaf,
            pinned=bool(self.pinned),
            created=datetime.fromisoformat(codec.decode(self.created)),
            last_used=datetime.fromisoformat(codec.decode(self.last_used)),
            tags=tuple(codec.loads(self.tags)),
            model=codec.decode(self.model),
            fingerprint=codec.decode(self.fingerprint),
            revision=self.revision,
            **body,
        )


class Newer(ValueError):
    """A newer version wrote this: it is not damaged and must not be dropped."""


def check_known(values: Any, known: Iterable[str]) -> None:
    """Raises Newer for a field that this version lacks."""
    unknown = set(values) - set(known)
    if unknown:
        raise Newer(f"field {sorted(unknown)[0]!r} is unknown: a newer lmchat wrote it")


_TURN_BODY = frozenset(_names_in_rows(Turn)) - set(TURN_COLUMNS)


class UnreadTurn:
    """A row of TURN_COLUMNS whose checksum is verified, parsed when its turn is needed."""

    __slots__ = ("_name", "_row", "length", "parent", "prefix_length")

    def __init__(self, name: str, row: Sequence[Any]) -> None:
        (
            turn_id,
            self.parent,
            _role,
            self.prefix_length,
            self.length,
            _text,
            tokens,
            _body,
            _checksum,
        ) = row
        count = codec.token_count(tokens)
        if self.prefix_length + count != self.length:
            raise ValueError(
                f"turn {turn_id} has {self.prefix_length} + {count} tokens, expected {self.length}"
            )
        self._name, self._row = name, row

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Id of the turn."""
        return codec.unpack_tokens(self._row[6])

    def turn(self) -> Turn:
        """Parses the turn. Raises StoreError for what a bug or a newer version wrote."""
        try:
            return self._turn()
        except DAMAGE as error:
            raise damaged(self._name, error) from error

    def _turn(self) -> Turn:
        turn_id, _parent, role, _keep, _length, text, _tokens, body, _checksum = self._row
        values = codec.loads(body) if body != b"{}" else {}
        if not values.keys() <= _TURN_BODY:
            check_known(values, _TURN_BODY)
        columns = (turn_id, self.parent, codec.decode(role), self.prefix_length, self.length)
        return _turn((*columns, codec.decode(text)), self.token_ids, values)


def unread(session: Row, found: Iterable[Sequence[Any]]) -> list[tuple[int, UnreadTurn]]:
    """Returns ids and unread turns of rows of TURN_COLUMNS with their checksums.

    Raises ValueError for a damaged row. `UnreadTurn.turn()` may find further errors.
    """
    for row in found:
        if turn_checksum(session.id, row[:-1]) != row[-1]:
            raise ValueError(f"the checksum of turn {row[0]} is wrong")
    return [(row[0], UnreadTurn(session.shown_name, row)) for row in found]


def _turn(columns: Sequence[Any], tokens: tuple[int, ...], values: dict[str, Any]) -> Turn:
    turn_id, parent, role, prefix_length, length, text = columns
    if prefix_length + len(tokens) != length:
        raise ValueError(
            f"turn {turn_id} has {prefix_length} + {len(tokens)} tokens, expected {length}"
        )
    if "error" in values:
        values["error"] = error_of(*values["error"])
    for name, kind in _PARTS.items():
        if name in values:
            values[name] = kind(**values[name])
    if "message" not in values:
        values["message"] = {"role": role, "content": text}
    return Turn(
        id=turn_id,
        parent=parent,
        role=role,
        prefix_length=prefix_length,
        length=length,
        text=text,
        token_ids=tokens,
        **values,
    )


def error_of(kind: str, text: str) -> Error:
    """Returns the error of a class name and a text, an `Error` for an unknown class."""
    found = _ERRORS.get(kind, Error)
    return found(text) if issubclass(found, Error) else Error(text)


def start_of(data: bytes) -> TurnStart:
    """Parses the start of a generation. Raises ValueError for other bytes than `start_blob()`'s."""
    values = codec.loads(data)
    check_known(values, _names_in_rows(TurnStart))
    for name, stored in _STORED_NAMES.items():
        if stored in values:
            values[name] = values.pop(stored)
    values.setdefault("settings", {})
    if values.get("user") is not None:
        values["user"] = _turn_of_list(values["user"])
    values["past"] = tuple(map(_turn_of_list, values.get("past", ())))
    return TurnStart(**values)


def _turn_of_list(found: Sequence[Any]) -> Turn:
    *columns, tokens, body = found
    return _turn(columns, tuple(tokens), body)


def tree_of(turns: Iterable[tuple[int, UnreadTurn]]) -> TurnTree:
    """Returns the tree of turns, which come parents first.

    Raises ValueError where a parent is missing or shorter than the prefix that a turn keeps.
    """
    found = list(turns)
    lengths: dict[int | None, int] = {None: 0}
    for turn_id, turn in found:
        check_place(turn_id, turn, lengths.get(turn.parent))
        lengths[turn_id] = turn.length
    return TurnTree(found)


def check_place(turn_id: int, turn: Turn | UnreadTurn, most: int | None) -> None:
    """Raises ValueError unless the turn fits a parent of `most` tokens (None: a missing one)."""
    if most is None:
        raise ValueError(f"turn {turn_id} hangs under turn {turn.parent}, which is not there")
    if not 0 <= turn.prefix_length <= most:
        raise ValueError(
            f"turn {turn_id} keeps {turn.prefix_length} tokens, expected at most {most}"
        )


def damaged(name: str, error: Exception) -> StoreError:
    """Returns the error of a session whose rows are damaged."""
    damage = StoreError(
        f"session {name!r} is damaged: {error}. Other sessions are usable; it can be deleted"
    )
    return with_public(damage, f"session {name!r} is damaged; it can be deleted")
