"""Where sessions are kept between their uses: for now, the memory of the process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lmchat.errors import InvalidRequest, NotFound
from lmchat.turns import TurnTree

MAX_NAME = 200  # characters


def now() -> datetime:
    """The moment, with its zone."""
    return datetime.now(timezone.utc)


@dataclass
class SessionRecord:
    """What a session is, apart from what it is doing: its turns and its settings.

    `leaf` is the last turn of the current branch. `created` also is the date that templates see, so
    that a past never changes at midnight.
    """

    name: str
    owner: str
    history: str  # "keep" | "template"
    settings: dict[str, Any] = field(default_factory=dict)
    template_variables: dict[str, Any] = field(default_factory=dict)
    tree: TurnTree = field(default_factory=TurnTree)
    leaf: int | None = None
    pinned: bool = False
    created: datetime = field(default_factory=now)
    last_used: datetime = field(default_factory=now)

    @property
    def title(self) -> str:
        """The beginning of the first user message; empty before it."""
        for turn in self.tree.path(self.leaf):
            if turn.role == "user":
                words = " ".join(turn.text.split())
                return words if len(words) <= 60 else words[:59] + "…"
        return ""


class MemoryStore:
    """Records by owner and name. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str], SessionRecord] = {}
        self._numbered = 0

    def find(self, owner: str, name: str) -> SessionRecord | None:
        """The record, None when there is none."""
        with self._lock:
            return self._records.get((owner, name))

    def add(self, record: SessionRecord) -> None:
        """Keeps a new record; InvalidRequest when the name is taken or no name."""
        check_name(record.name)
        with self._lock:
            self._add(record)

    def add_numbered(self, record: SessionRecord) -> None:
        """Keeps a new record under the next free name of "chat-1", "chat-2"..."""
        with self._lock:
            while not record.name or (record.owner, record.name) in self._records:
                self._numbered += 1
                record.name = f"chat-{self._numbered}"
            self._add(record)

    def _add(self, record: SessionRecord) -> None:
        key = (record.owner, record.name)
        if key in self._records:
            raise InvalidRequest(f"session name {record.name!r} is taken, expected a new one")
        self._records[key] = record

    def rename(self, record: SessionRecord, name: str) -> None:
        """Moves the record to another name; InvalidRequest when that is taken."""
        check_name(name)
        with self._lock:
            if self._records.get((record.owner, record.name)) is not record:
                raise NotFound(f"no session {record.name!r}")
            if (record.owner, name) in self._records:
                raise InvalidRequest(f"session name {name!r} is taken, expected a new one")
            del self._records[record.owner, record.name]
            record.name = name
            self._records[record.owner, name] = record

    def remove(self, record: SessionRecord) -> None:
        """Forgets this very record; NotFound when it is not here."""
        with self._lock:
            if self._records.get((record.owner, record.name)) is not record:
                raise NotFound(f"no session {record.name!r}")
            del self._records[record.owner, record.name]

    def records(self, owner: str | None = None) -> list[SessionRecord]:
        """All, or an owner's, the last used first."""
        with self._lock:
            found = [r for r in self._records.values() if owner in (None, r.owner)]
        return sorted(found, key=lambda record: record.last_used, reverse=True)


def check_name(name: object) -> None:
    """InvalidRequest unless `name` is a printable text that a user can type again."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME
        or name != name.strip()
        or not name.isprintable()
    ):
        raise InvalidRequest(
            f"session name is {name!r}, expected 1 to {MAX_NAME} printable characters without "
            "spaces around them"
        )


def check_mapping(what: str, given: object) -> dict[str, Any]:
    """A copy of `given`; InvalidRequest unless it is a mapping with text keys, or None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidRequest(f"{what} is {given!r}, expected a mapping from names to values")
    return dict(given)
