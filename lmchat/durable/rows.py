"""Sessions and turns as rows of the tables, and back.

What lists and searches look at has columns of its own; all other fields that are not at their
default are one JSON value, `body`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from lmchat import errors
from lmchat.durable import codec
from lmchat.errors import Error, InvalidRequest, StoreError
from lmchat.store import SessionRecord, TurnStart
from lmchat.turns import Timings, Turn, TurnTree, Usage

SESSION_COLUMNS = (
    "id", "owner", "name", "revision", "changed", "leaf", "pinned", "created", "last_used",
    "used_at", "title", "questions", "tokens", "size", "tags", "model", "fingerprint", "body",
    "checksum",
)  # fmt: skip
TURN_COLUMNS = ("id", "parent", "role", "keep", "length", "text", "token_ids", "body")
_RECORD_COLUMNS = (
    "id", "owner", "name", "leaf", "pinned", "created", "last_used", "tags", "model", "fingerprint",
    "revision",
)  # fmt: skip
_CHECKED = ("changed", "size", *_RECORD_COLUMNS, "body")
READ_COLUMNS = ", ".join(("key", *_CHECKED, "checksum"))
"""What `Row` is made of, in order."""

_ERRORS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
_PARTS = {"usage": Usage, "timings": Timings}


# --- writing ---------------------------------------------------------------------------------


def session_values(record: SessionRecord) -> dict[str, Any]:
    """The columns of a session but `revision`, `changed`, `size` and `checksum`. InvalidRequest for
    a field that cannot be kept."""
    path = record.tree.path(record.leaf)
    return {
        "id": codec.column(record.id),
        "owner": codec.column(record.owner),
        "name": codec.column(record.name),
        "leaf": record.leaf,
        "pinned": int(record.pinned),
        "created": record.created.isoformat(),
        "last_used": record.last_used.isoformat(),
        "used_at": microseconds(record.last_used),
        "title": codec.column(record.title),
        "questions": sum(turn.role == "user" for turn in path),
        "tokens": path[-1].length if path else 0,
        "tags": _dumps("tags", list(record.tags)),
        "model": codec.column(record.model),
        "fingerprint": codec.column(record.fingerprint),
        "body": _body(record, (*_RECORD_COLUMNS, "tree")),
    }


def session_checksum(values: Mapping[str, Any]) -> int:
    """Of a session's columns; those that only lists show are not in it."""
    return codec.checksum(*(values[name] for name in _CHECKED))


def turn_checksum(session: str | bytes, values: Sequence[Any]) -> int:
    """Of the TURN_COLUMNS of a turn in the session with this id."""
    return codec.checksum(session, *values)


def microseconds(moment: datetime) -> int:
    """Since 1970, to sort by."""
    return int(moment.timestamp() * 1e6)


def turn_values(turn: Turn) -> tuple[Any, ...]:
    """The TURN_COLUMNS of a turn. InvalidRequest for a field that cannot be kept."""
    expected = turn.keep + len(turn.token_ids)
    if turn.keep < 0 or turn.length != expected:
        raise InvalidRequest(
            f"turn {turn.id} is {turn.length} tokens long, expected {expected}: the {turn.keep} "
            f"it keeps and its own {len(turn.token_ids)}"
        )
    return (
        turn.id,
        turn.parent,
        codec.column(turn.role),
        turn.keep,
        turn.length,
        codec.column(turn.text),
        tokens_blob(turn.token_ids),
        _body(turn, TURN_COLUMNS),
    )


def tokens_blob(token_ids: Iterable[int]) -> bytes:
    """Token ids as bytes; InvalidRequest for ids that are none."""
    try:
        return codec.pack_tokens(token_ids)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def start_blob(start: TurnStart) -> bytes:
    """What a generation starts from as bytes."""
    values = dict(_fields(start, ()))
    if start.user is not None:
        *columns, tokens, body = turn_values(start.user)
        columns = [codec.decode(v) if isinstance(v, bytes) else v for v in columns]
        values["user"] = [*columns, list(codec.unpack_tokens(tokens)), codec.loads(body)]
    return _dumps("start", values)


def _body(item: SessionRecord | Turn, columns: Sequence[str]) -> bytes:
    values: dict[str, Any] = {}
    for name, value in _fields(item, columns):
        if name == "error":
            values[name] = [type(value).__name__, str(value)]
        elif name in _PARTS:
            values[name] = dict(_fields(value, ()))
        else:
            values[name] = value
    if isinstance(item, Turn) and list(item.message.items()) == _plain_message(item):
        del values["message"]
    return _dumps("the session" if isinstance(item, SessionRecord) else f"turn {item.id}", values)


def _plain_message(turn: Turn) -> list[tuple[str, Any]]:
    return [("role", turn.role), ("content", turn.text)]


def _fields(item: Any, without: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The fields that are not at their default, by name."""
    for field in dataclasses.fields(item):
        if field.name in without:
            continue
        value = getattr(item, field.name)
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if type(value) is not type(default) or value != default:
            yield field.name, value


def _dumps(what: str, value: object) -> bytes:
    try:
        return codec.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{what} cannot be kept: {error}") from None


# --- reading ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """A session's row. `body` and what else is a value are still bytes."""

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
        """StoreError when it is not what was written."""
        if session_checksum(vars(self)) != self.checksum:
            raise damaged(self.shown_name, ValueError("the checksum of its row is wrong"))

    @property
    def shown_name(self) -> str:
        """Its name, as far as it can be read; damage may leave something else in its place."""
        return self.name.decode("utf-8", "replace") if isinstance(self.name, bytes) else "?"

    def fill(self, record: SessionRecord) -> None:
        """Sets the record's fields, its tree apart. StoreError for a damaged row, ValueError for
        one of a newer version."""
        self.check()
        body = codec.loads(self.body)
        known = {field.name for field in dataclasses.fields(SessionRecord)}
        check_known(body, known - {*_RECORD_COLUMNS, "tree"})
        fresh = SessionRecord(name="", owner="", history="")
        for field in known - {"tree"}:
            setattr(record, field, body.get(field, getattr(fresh, field)))
        record.id = codec.decode(self.id)
        record.owner = codec.decode(self.owner)
        record.name = codec.decode(self.name)
        record.leaf = self.leaf
        record.pinned = bool(self.pinned)
        record.created = datetime.fromisoformat(codec.decode(self.created))
        record.last_used = datetime.fromisoformat(codec.decode(self.last_used))
        record.tags = tuple(codec.loads(self.tags))
        record.model = codec.decode(self.model)
        record.fingerprint = codec.decode(self.fingerprint)
        record.revision = self.revision


def check_known(values: Any, known: Iterable[str]) -> None:
    """ValueError for a field that this version does not have."""
    unknown = set(values) - set(known)
    if unknown:
        raise ValueError(f"field {sorted(unknown)[0]!r} is unknown: a newer lmchat wrote it")


_TURN_BODY = frozenset(f.name for f in dataclasses.fields(Turn)) - set(TURN_COLUMNS)


def turn_of(session: bytes, row: Sequence[Any]) -> Turn:
    """The turn of TURN_COLUMNS and their checksum, in the session with this id. ValueError for a
    damaged one."""
    turn_id, parent, role, keep, length, text, tokens, body, checksum = row
    if turn_checksum(session, row[:-1]) != checksum:
        raise ValueError(f"the checksum of turn {turn_id} is wrong")
    values = codec.loads(body) if body != b"{}" else {}
    if not values.keys() <= _TURN_BODY:
        check_known(values, _TURN_BODY)
    return _turn(
        (turn_id, parent, codec.decode(role), keep, length, codec.decode(text)),
        codec.unpack_tokens(tokens),
        values,
    )


def _turn(columns: Sequence[Any], tokens: tuple[int, ...], values: dict[str, Any]) -> Turn:
    turn_id, parent, role, keep, length, text = columns
    if keep + len(tokens) != length:
        raise ValueError(f"turn {turn_id} has {keep} + {len(tokens)} tokens, expected {length}")
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
        keep=keep,
        length=length,
        text=text,
        token_ids=tokens,
        **values,
    )


def error_of(kind: str, text: str) -> Error:
    """The error of a name and a text; one of a class that is not here is an Error."""
    found = _ERRORS.get(kind, Error)
    return found(text) if issubclass(found, Error) else Error(text)


def start_of(data: bytes) -> TurnStart:
    """What a generation started from. ValueError for bytes that are not from `start_blob()`."""
    values = codec.loads(data)
    check_known(values, [field.name for field in dataclasses.fields(TurnStart)])
    values.setdefault("settings", {})
    if values.get("user") is not None:
        *columns, tokens, body = values["user"]
        values["user"] = _turn(columns, tuple(tokens), body)
    return TurnStart(**values)


def tree_of(turns: Iterable[Turn]) -> TurnTree:
    """The tree of turns, parents first. ValueError where one has no parent or keeps more than its
    parent has."""
    tree = TurnTree()
    for turn in turns:
        check_place(tree, turn)
        tree.adopt(turn)
    return tree


def check_place(tree: TurnTree, turn: Turn) -> None:
    """ValueError unless the turn can hang where it says."""
    if turn.parent is None:
        most = 0
    elif turn.parent in tree:
        most = tree.get(turn.parent).length
    else:
        raise ValueError(f"turn {turn.id} hangs under turn {turn.parent}, which is not there")
    if not 0 <= turn.keep <= most:
        raise ValueError(f"turn {turn.id} keeps {turn.keep} tokens, expected at most {most}")


def damaged(name: str, error: Exception) -> StoreError:
    """What to say of a session whose rows are no session."""
    return StoreError(
        f"session {name!r} is damaged: {error}. Other sessions are usable; it can be deleted"
    )
