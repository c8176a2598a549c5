"""A store within the process: what it keeps ends with it."""

from __future__ import annotations

import threading

from lmchat.errors import InvalidRequest, NotFound
from lmchat.store import SessionRecord, check_name


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
