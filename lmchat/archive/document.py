"""Conversion of a session to `session.json` and back.

Not here: the zip (`container`) and the schema (`schema`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime, timezone
from typing import Any, TypeVar

from lmchat import errors
from lmchat.archive import json_text
from lmchat.archive.schema import session_schema, wrong
from lmchat.errors import Error, InvalidRequest
from lmchat.generation import settings
from lmchat.store.protocol import check_metadata, check_name
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Timings, Turn, TurnTree, Usage

_STORED_HISTORY = {"append": "keep"}
"""The rule for earlier turns as archives spell it, where that differs from the record's."""
_HISTORY = {stored: rule for rule, stored in _STORED_HISTORY.items()}


FORMAT = "lmchat-session"
VERSION = 3
"""Version 2 adds `metadata`, version 3 `dropped_before` of turns. A session is written as the
oldest version that has what it has."""
T = TypeVar("T")


def to_document(record: SessionRecord) -> dict[str, Any]:
    """Returns the document of a session.

    It has no id, owner and revision, which belong to a store, and no notices of the next turn.
    Raises InvalidRequest for what could not be read back, such as a value that JSON lacks.
    """
    turns = sorted(record.tree, key=lambda turn: turn.id)
    document = {
        "format": FORMAT,
        "version": _version_of(record),
        "session": {
            "name": record.name,
            "title": record.own_title,
            "tags": list(record.tags),
            "pinned": record.pinned,
            "history": _STORED_HISTORY.get(record.history, record.history),
            "overflow": record.overflow,
            "settings": _settings_out("settings", record.settings),
            "template_variables": json_text.plain("template_variables", record.template_variables),
            "leaf": record.leaf,
            "created": _moment_out(record.created),
            "last_used": _moment_out(record.last_used),
            "adapter": record.adapter,
            "model": record.model,
            "fingerprint": record.fingerprint,
            "tokenizer": record.tokenizer,
            "template": record.template,
            **({"metadata": dict(record.metadata)} if record.metadata else {}),
        },
        "turns": [_turn_out(turn) for turn in turns],
    }
    session_schema().check(document)
    return document


def from_document(document: Any, owner: str) -> SessionRecord:
    """Returns a new session of `owner` with a new id. Raises InvalidRequest for a bad document."""
    _check_version(document)
    session_schema().check(document)
    _check_integers(document)
    found = document["session"]
    check_name(found["name"])
    record = SessionRecord(
        name=found["name"],
        owner=owner,
        history=_HISTORY.get(found["history"], found["history"]),
        settings=settings.validate(_settings_in(found["settings"])),
        template_variables=found["template_variables"],
        tree=_tree(document["turns"]),
        leaf=found["leaf"],
        pinned=found["pinned"],
        created=_moment_in("created", found["created"]),
        last_used=_moment_in("last_used", found["last_used"]),
        own_title=found["title"],
        tags=tuple(found["tags"]),
        overflow=found["overflow"],
        adapter=found["adapter"],
        model=found["model"],
        fingerprint=found["fingerprint"],
        tokenizer=found["tokenizer"],
        template=found["template"],
        metadata=check_metadata(found.get("metadata")),
    )
    if record.leaf is not None and record.leaf not in record.tree:
        raise InvalidRequest(f"leaf is {record.leaf}, expected the id of one of its turns")
    return record


def check_vocabulary(record: SessionRecord, vocab_size: int) -> None:
    """Raises InvalidRequest for a token id outside the vocabulary."""
    for turn in record.tree:
        if turn.token_ids and max(turn.token_ids) >= vocab_size:
            raise InvalidRequest(
                f"turn {turn.id} has the token id {max(turn.token_ids)}, expected less than "
                f"{vocab_size}, the vocabulary"
            )


def _version_of(record: SessionRecord) -> int:
    if any(turn.dropped_before is not None for turn in record.tree):
        return 3
    return 2 if record.metadata else 1


def _listed(turns: Any) -> list[Any]:
    """Returns the turns of a document that has not been checked."""
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidRequest(f"it has no format {FORMAT!r}: it is not an archive of a session")
    version = document.get("version", VERSION)
    if type(version) is not int:  # the schema takes True for 1
        raise wrong("version", version, str(VERSION))
    if version < 2 and "metadata" in document.get("session", {}):
        raise InvalidRequest(f"its version is {version}, expected 2 or more with metadata")
    if version < 3 and any("dropped_before" in turn for turn in _listed(document.get("turns"))):
        raise InvalidRequest(f"its version is {version}, expected 3 or more with dropped_before")
    if version > VERSION:
        raise InvalidRequest(
            f"its version is {version}, expected at most {VERSION}: a newer lmchat wrote it"
        )


def _check_integers(document: dict[str, Any]) -> None:
    """Refuses floats such as 1.0, which the schema accepts, for ids, lengths and counts."""
    session, turns = document["session"], document["turns"]
    _check_integer("session.leaf", session["leaf"], "integer or null")
    _check_seed("session.settings", session["settings"])
    for i, turn in enumerate(turns):
        place = f"turns[{i}]"
        for name in ("id", "keep", "length", "dropped_before"):
            _check_integer(f"{place}.{name}", turn.get(name))
        _check_integer(f"{place}.parent", turn["parent"], "integer or null")
        if not set(map(type, turn["token_ids"])) <= {int}:
            for j, token in enumerate(turn["token_ids"]):
                _check_integer(f"{place}.token_ids[{j}]", token)
        for name, count in turn.get("usage", {}).items():
            _check_integer(f"{place}.usage.{name[:60]}", count)
        _check_seed(f"{place}.settings", turn.get("settings", {}))


def _check_seed(place: str, found: dict[str, Any]) -> None:
    for name in ("seed", "attempt"):
        _check_integer(f"{place}.{name}", found.get(name))


def _check_integer(place: str, value: Any, expected: str = "integer") -> None:
    if isinstance(value, float):
        raise wrong(place, value, expected)


def _turn_out(turn: Turn) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": turn.id,
        "parent": turn.parent,
        "role": turn.role,
        "text": turn.text,
        "message": json_text.plain(f"message of turn {turn.id}", turn.message),
        "token_ids": list(turn.token_ids),
        "keep": turn.prefix_length,
        "length": turn.length,
    }
    if turn.metadata:
        found["metadata"] = json_text.plain(f"metadata of turn {turn.id}", turn.metadata)
    if turn.dropped_before is not None:
        found["dropped_before"] = turn.dropped_before
    if turn.role == "assistant":
        found |= {
            "reasoning": turn.reasoning,
            "finish_reason": turn.finish_reason,
            "stopped": turn.stopped,
            "error": _error_out(turn.error),
            "usage": asdict(turn.usage),
            "timings": asdict(turn.timings),
            "settings": _settings_out(f"settings of turn {turn.id}", turn.settings),
        }
    return found


def _tree(found: list[dict[str, Any]]) -> TurnTree:
    turns: dict[int, Turn] = {}
    last = 0
    for each in found:
        where = f"turn {each['id']}"
        if each["id"] <= last:
            raise InvalidRequest(f"{where} follows turn {last}, expected ascending ids")
        last = each["id"]
        # Only earlier turns are accepted as parents, so there are no cycles.
        if each["parent"] is not None and each["parent"] not in turns:
            raise InvalidRequest(
                f"{where} has the parent {each['parent']}, expected a turn before it"
            )
        turn = _turn_in(each, where)
        _check_place(turn, None if turn.parent is None else turns[turn.parent], where)
        if turn.dropped_before is not None and turn.dropped_before not in turns:
            raise InvalidRequest(
                f"{where} has dropped_before {turn.dropped_before}, expected a turn before it"
            )
        turns[turn.id] = turn
    return TurnTree.of(turns.values())


def _turn_in(found: dict[str, Any], where: str) -> Turn:
    found = dict(found)
    found["token_ids"] = tuple(found["token_ids"])
    replies = {"reasoning", "finish_reason", "stopped", "error", "usage", "timings", "settings"}
    if found["role"] == "assistant":
        missing = replies - found.keys()
        if missing:
            raise InvalidRequest(f"{where} has no {sorted(missing)[0]}, expected it of a reply")
        found["error"] = _error_in(found["error"])
        found["usage"] = _counts_in(Usage, found["usage"], f"usage of {where}")
        found["timings"] = _counts_in(Timings, found["timings"], f"timings of {where}")
        found["settings"] = _settings_in(found["settings"])
    elif replies & found.keys():
        raise InvalidRequest(f"{where} has {sorted(replies & found.keys())[0]}, but is not a reply")
    found["prefix_length"] = found.pop("keep")
    return Turn(**found)


def _check_place(turn: Turn, parent: Turn | None, where: str) -> None:
    """Refuses a turn whose role or length does not fit its parent."""
    before = parent.length if parent else 0
    if turn.prefix_length > before:
        raise InvalidRequest(f"{where} keeps {turn.prefix_length} tokens of {before} before it")
    if turn.length != turn.prefix_length + len(turn.token_ids):
        raise InvalidRequest(
            f"{where} has the length {turn.length}, "
            f"expected {turn.prefix_length + len(turn.token_ids)}"
        )
    if turn.stopped and not turn.token_ids:
        raise InvalidRequest(f"{where} ended with a stop token, but has no tokens")
    role = parent.role if parent else "none"
    if turn.role == "system" and parent is not None:
        raise InvalidRequest(f"{where} is a system prompt after another turn, expected none")
    if turn.role == "user" and role == "user":
        raise InvalidRequest(f"{where} is a question after a question, expected a reply before it")
    if turn.role == "assistant" and role != "user":
        raise InvalidRequest(f"{where} is a reply to {role}, expected one to user")


def _error_out(error: Error | None) -> dict[str, str] | None:
    if error is None:
        return None
    name = type(error).__name__
    return {"type": name if name in errors.__all__ else "Error", "message": str(error)}


def _error_in(found: dict[str, str] | None) -> Error | None:
    if found is None:
        return None
    if found["type"] not in errors.__all__:
        raise InvalidRequest(f"error is of type {found['type']!r}, expected one of lmchat.errors")
    error: Error = getattr(errors, found["type"])(found["message"])
    return error


def _settings_out(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json_text.plain(what, settings.as_json(given))
    return copied


def _settings_in(found: dict[str, Any]) -> dict[str, Any]:
    bias = found.get("logit_bias")
    if bias is None:
        return found
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in bias):
        raise InvalidRequest("logit_bias has keys that are no token ids")
    ids = {int(key): float(b) if isinstance(b, str) else b for key, b in bias.items()}
    if len(ids) != len(bias):
        raise InvalidRequest("logit_bias has a token id twice")
    return {**found, "logit_bias": ids}


def _counts_in(kind: type[T], found: dict[str, Any], what: str) -> T:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in found:
        if name not in known:
            raise InvalidRequest(f"{what} has {name[:60]!r}, expected {', '.join(known)}")
    return kind(**found)


def _moment_out(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).isoformat(timespec="microseconds")


def _moment_in(what: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} is {text!r}, expected a moment: {error}") from None
