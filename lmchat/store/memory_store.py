"""A store in memory: its sessions end with the process."""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from lmchat.errors import NotFound
from lmchat.store.prefixes import SharedPrefix
from lmchat.store.protocol import Stale, check_name, no_session, taken
from lmchat.store.records import (
    AskedState,
    JournalEntry,
    Lease,
    SessionRecord,
    Summary,
    TurnRequest,
    TurnStart,
    shortened,
)
from lmchat.store.turns import Turn
from lmchat.store.words import matches

_Place = tuple[datetime, int, str]  # last use, number in the order of addition, id


class MemoryStore:
    """A store in memory, by owner and name. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, SessionRecord] = {}  # by id
        self._ids: dict[tuple[str, str], str] = {}  # by owner and name
        self._fencing_tokens: dict[str, int] = {}  # fencing token of the newest lease, by session
        self._by_use: dict[str, list[_Place]] = {}  # of each owner's sessions, the last used last
        self._places: dict[str, _Place] = {}  # by id
        self._changed_at: dict[str, int] = {}  # by id: revision of the last change but renames
        self._summaries: dict[str, tuple[SessionRecord, Summary]] = {}  # by id
        self._count = itertools.count()
        self._requests: dict[str, TurnRequest] = {}  # of the last turn, by session
        self._notes: dict[str, Any] = {}
        self._numbered = 0

    def find(self, owner: str, name: str) -> SessionRecord | None:
        """Returns the record, or None."""
        with self._lock:
            found = self._ids.get((owner, name))
            return None if found is None else self._records[found]

    def find_by_id(self, owner: str, session_id: str) -> SessionRecord | None:
        """Returns the owner's record of this id, or None."""
        with self._lock:
            found = self._records.get(session_id)
            return found if found is not None and found.owner == owner else None

    def add(self, record: SessionRecord) -> SessionRecord:
        """Adds a session. Raises InvalidRequest when the name is taken or invalid."""
        check_name(record.name)
        with self._lock:
            self._check_free(record.owner, record.name)
            return self._put(replace(record, revision=1))

    def add_numbered(self, record: SessionRecord) -> SessionRecord:
        """Adds a session. If its name is empty or taken, it gets the next free one of "chat-1",
        "chat-2"..."""
        with self._lock:
            name = record.name
            while not name or (record.owner, name) in self._ids:
                self._numbered += 1
                name = f"chat-{self._numbered}"
            return self._put(replace(record, name=name, revision=1))

    def _put(self, record: SessionRecord, changed: bool = True) -> SessionRecord:
        self._records[record.id] = record
        self._ids[record.owner, record.name] = record.id
        if changed:
            self._changed_at[record.id] = record.revision
        place = self._places.get(record.id)
        if place is None or place[0] != record.last_used:
            number = next(self._count) if place is None else place[1]
            self._take_place(record)
            self._places[record.id] = place = (record.last_used, number, record.id)
            bisect.insort(self._by_use.setdefault(record.owner, []), place)
        return record

    def _take_place(self, record: SessionRecord) -> None:
        """Removes the session from the order of last use."""
        place = self._places.pop(record.id, None)
        if place is not None:
            places = self._by_use[record.owner]
            del places[bisect.bisect_left(places, place)]
            if not places:
                del self._by_use[record.owner]

    def _check_free(self, owner: str, name: str) -> None:
        if (owner, name) in self._ids:
            raise taken(name)

    def refresh(self, record: SessionRecord) -> SessionRecord:
        """Returns the session's record. Raises NotFound when it was deleted."""
        with self._lock:
            return self._here(record)

    def rename(self, record: SessionRecord, name: str) -> SessionRecord:
        """Gives the session another name. Raises InvalidRequest when that is taken, NotFound."""
        check_name(name)
        with self._lock:
            found = self._here(record)
            self._check_free(found.owner, name)
            del self._ids[found.owner, found.name]
            return self._put(replace(found, name=name, revision=found.revision + 1), changed=False)

    def change(self, record: SessionRecord, turns: Sequence[Turn] = ()) -> SessionRecord:
        """Replaces the session's record.

        Raises:
            Stale: another writer has changed the session since.
            NotFound: it was deleted.
        """
        with self._lock:
            self._check_fresh(record)
            return self._changed(record, turns)

    def _check_fresh(self, record: SessionRecord) -> None:
        found = self._here(record)
        if not self._changed_at[record.id] <= record.revision <= found.revision:
            raise Stale

    def _changed(self, record: SessionRecord, turns: Sequence[Turn]) -> SessionRecord:
        found = self._here(record)
        tree, revision = found.tree.with_turns(turns), found.revision + 1
        return self._put(replace(record, tree=tree, name=found.name, revision=revision))

    def remove(self, record: SessionRecord) -> None:
        """Removes the session. Raises NotFound when it is not here."""
        with self._lock:
            found = self._here(record)
            del self._records[found.id], self._ids[found.owner, found.name]
            self._take_place(found)
            del self._changed_at[found.id]
            self._summaries.pop(found.id, None)
            self._fencing_tokens.pop(found.id, None)
            self._requests.pop(found.id, None)

    def _here(self, record: SessionRecord) -> SessionRecord:
        found = self._records.get(record.id)
        if found is None:
            raise NotFound(f"no session {record.name!r}")
        return found

    def records(self, owner: str | None = None) -> list[SessionRecord]:
        """Returns all records, or an owner's, the last used first."""
        with self._lock:
            return [self._records[place[2]] for place in self._ordered(owner, None)]

    def _ordered(self, owner: str | None, after: str | None) -> Iterator[_Place]:
        """Yields the places of an owner's sessions, or of all, from the last used on. Raises
        NotFound for an unknown `after`."""
        owners = [owner] if owner is not None else list(self._by_use)
        end = None
        if after is not None:
            end = self._places.get(after)
            if end is None or self._records[after].owner not in owners:
                raise no_session(after)
        yield from heapq.merge(*(self._backwards(one, end) for one in owners), reverse=True)

    def _backwards(self, owner: str, end: _Place | None) -> Iterator[_Place]:
        places = self._by_use.get(owner, [])
        last = len(places) if end is None else bisect.bisect_left(places, end)
        for at in range(last - 1, -1, -1):
            yield places[at]

    def summaries(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        without_tag: str | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Summary]:
        """Returns summaries, the last used first.

        `search` selects sessions with all its words in a message, a title or the name. `after` is
        the id of the last session of the page before. Raises NotFound where that is unknown.
        """
        found: list[Summary] = []
        for record in self._listed(owner, search, tag, without_tag, limit, after):
            if limit is not None and len(found) >= limit:
                break
            snippet = "" if search is None else _snippet(record, search)
            if snippet is not None:
                found.append(self._summary(record, snippet))
        return found

    def _listed(
        self,
        owner: str | None,
        search: str | None,
        tag: str | None,
        without_tag: str | None,
        limit: int | None,
        after: str | None,
    ) -> list[SessionRecord]:
        """Returns the records of a page, or those to search. Only the lock's holder reads the
        tables, and it reads no turn: journals wait for it."""
        found: list[SessionRecord] = []
        with self._lock:
            for place in self._ordered(owner, after):
                if search is None and limit is not None and len(found) >= limit:
                    break
                record = self._records[place[2]]
                if tag in (None, *record.tags) and without_tag not in record.tags:
                    found.append(record)
            cursor = self._records.get(after or "")
        if cursor is not None and search is not None and _snippet(cursor, search) is None:
            raise no_session(cursor.id)
        return found

    def _summary(self, record: SessionRecord, snippet: str) -> Summary:
        known = self._summaries.get(record.id)
        if known is None or known[0] is not record:
            known = record, summary(record)
            with self._lock:
                if self._records.get(record.id) is record:
                    self._summaries[record.id] = known
        return known[1] if not snippet else replace(known[1], snippet=snippet)

    def count(self, owner: str) -> int:
        """Returns the number of an owner's sessions."""
        with self._lock:
            return len(self._by_use.get(owner, ()))

    def common(self, owner: str, token_ids: Sequence[int]) -> SharedPrefix:
        """Returns the prefix shared with the owner's sessions, by comparing with each of them."""
        found = SharedPrefix()
        for record in self.records(owner):
            ends = set(record.tree.ends())
            for turn in record.tree:
                found.compare(token_ids, record.tree.token_ids(turn.id), turn.id in ends)
        return found

    # --- one turn ------------------------------------------------------------------------------

    def begin(self, record: SessionRecord, start: TurnStart, request: str = "") -> Lease:
        """Takes the next lease of the session, also while an older one was not released.

        Raises:
            Stale: another writer has changed the session since.
            NotFound: it was deleted.
        """
        with self._lock:
            self._check_fresh(record)
            token = self._fencing_tokens[record.id] = self._fencing_tokens.get(record.id, 0) + 1
            self._requests.pop(record.id, None)
            if request:
                self._requests[record.id] = TurnRequest(
                    request, start.reply_id, token, "open", int(time.time()), is_own=True
                )
            return Lease(record.id, token)

    def journal(self, tokens: Iterable[tuple[Lease, Sequence[int]]]) -> list[Lease]:
        """Checks the leases only: a session in memory ends with its process."""
        with self._lock:
            stale = [lease for lease, _ in tokens if self._is_stale(lease)]
        if stale:
            raise Stale("a lease was taken over", stale)
        return []

    def stops(self) -> list[Lease]:
        """Returns nothing: no other process sees the sessions."""
        return []

    def request_stop(self, record: SessionRecord, fencing_token: int) -> None:
        """Does nothing: all turns are those of this process."""

    def _is_stale(self, lease: Lease) -> bool:
        return self._fencing_tokens.get(lease.session, lease.fencing_token) != lease.fencing_token

    def sync(self) -> None:
        """Does nothing."""

    def finish(self, lease: Lease, record: SessionRecord, turns: Sequence[Turn]) -> SessionRecord:
        """Replaces the session's record at the end of a turn.

        Raises:
            Stale: the lease was taken over.
            NotFound: the session was deleted.
        """
        with self._lock:
            self._here(record)
            if self._is_stale(lease):
                raise Stale("the lease was taken over", [lease])
            if (request := self._requests.get(record.id)) is not None:
                self._requests[record.id] = replace(request, at=int(time.time()))
            return self._changed(record, turns)

    def release(self, lease: Lease) -> None:
        """Does nothing: the next turn takes a lease of its own."""

    def unfinished(
        self, record: SessionRecord, *, living: bool = False, skip: int = 0
    ) -> JournalEntry | None:
        """Returns None: an unfinished turn has a living owner and no journal."""
        return None

    def recover(self, record: SessionRecord) -> Lease:
        """Takes the next lease; there is never anything to recover."""
        return self.begin(record, TurnStart(None, 0, 0, {}))

    # --- requests of clients -----------------------------------------------------------------

    def request(self, record: SessionRecord) -> TurnRequest | None:
        """Returns the client's request that the session's last turn answers, or None."""
        with self._lock:
            return self._requests.get(self._here(record).id)

    def mark_request(
        self, record: SessionRecord, fencing_token: int, state: AskedState, again: bool = False
    ) -> None:
        """Changes the state of the request whose turn has, or had, the lease of this token, of a
        settled one only with `again`."""
        with self._lock:
            found = self._requests.get(self._here(record).id)
            if found is None or found.fencing_token != fencing_token:
                return
            if found.state != "settled" or again:
                found = replace(found, state=state, at=int(time.time()))
                self._requests[record.id] = found

    def equal_requests(self, owner: str, digest: str) -> list[str]:
        """Returns the owner's sessions whose last turn answers such a request, which is not
        settled."""
        with self._lock:
            found = [
                (request.at, session)
                for session, request in self._requests.items()
                if request.digest == digest and request.state != "settled"
            ]
            ids = [session for _, session in sorted(found, reverse=True)]
            return [i for i in ids if self._records[i].owner == owner]

    # --- small facts ----------------------------------------------------------------------------

    def note(self, key: str, value: Any) -> None:
        """Stores a value."""
        self._notes[key] = value

    def noted(self, key: str) -> Any:
        """Returns the value, or None."""
        return self._notes.get(key)

    def close(self) -> None:
        """Does nothing: other engines may use the store."""


def summary(record: SessionRecord, snippet: str = "") -> Summary:
    """Returns the summary of a record."""
    path = record.tree.path(record.leaf)
    return Summary(
        id=record.id,
        name=record.name,
        owner=record.owner,
        title=record.title,
        tags=record.tags,
        turns=sum(turn.role == "user" for turn in path),
        tokens=path[-1].length if path else 0,
        pinned=record.pinned,
        created=record.created,
        last_used=record.last_used,
        model=record.model,
        fingerprint=record.fingerprint,
        snippet=snippet,
        revision=record.revision,
        metadata=dict(record.metadata),
    )


def _snippet(record: SessionRecord, search: str) -> str | None:
    """Returns the first text that has all words of `search`, or None."""
    for text in (record.name, record.title, *(turn.text for turn in record.tree)):
        if matches(text, search):
            return shortened(text)
    return None
