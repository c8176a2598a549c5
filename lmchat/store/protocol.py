"""The promises of a store of sessions, and the checks of what users give to name sessions.

A turn is written in four calls: `begin()` takes the session's lease and persists the start,
`journal()` appends tokens before they are shown (a write-ahead log), `finish()` persists the turn
and empties the journal, `release()` ends the lease. Every other change is one `change()`.

Records are immutable. A method that changes a session returns its new record, and the caller uses
that from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from lmchat.errors import Error, InvalidRequest, NotFound
from lmchat.store.prefixes import SharedPrefix
from lmchat.store.records import (
    AskedState,
    JournalEntry,
    Lease,
    SessionRecord,
    Summary,
    TurnRequest,
    TurnStart,
)
from lmchat.store.turns import Turn
from turbomind.params import wrong
from turbomind.shown import shown

MAX_NAME = 200  # characters
MAX_TAGS = 256


class Stale(Error):
    """The record is older than the session in the store: `refresh()` it and plan again.

    `journal()` fills `leases` with those that are not the newest of their sessions.
    """

    def __init__(
        self, message: str = "the session has changed", leases: Iterable[Lease] = ()
    ) -> None:
        super().__init__(message)
        self.leases = tuple(leases)


class Store(Protocol):
    """A place where sessions persist.

    Any thread may call any method. Every method raises StoreError when it cannot read or write,
    and has changed nothing then. NotFound means that the session was deleted.
    """

    def find(self, owner: str, name: str) -> SessionRecord | None:
        """Returns the session with its turns, or None."""

    def find_by_id(self, owner: str, session_id: str) -> SessionRecord | None:
        """Returns the owner's session of that id with its turns, or None."""

    def add(self, record: SessionRecord) -> SessionRecord:
        """Persists a new session with its turns, and returns its record. Raises InvalidRequest when
        the name is taken or invalid."""

    def add_numbered(self, record: SessionRecord) -> SessionRecord:
        """Persists a new session, and returns its record. If its name is empty or taken, it gets
        the next free one of "chat-1", "chat-2"..."""

    def refresh(self, record: SessionRecord) -> SessionRecord:
        """Returns the session as it is now: the given record itself while no other writer has
        changed the session. Raises NotFound.

        Args:
            record: a record that the store returned.
        """

    def rename(self, record: SessionRecord, name: str) -> SessionRecord:
        """Gives the session another name, and returns its record. Raises InvalidRequest when the
        name is taken, NotFound."""

    def change(self, record: SessionRecord, turns: Sequence[Turn] = ()) -> SessionRecord:
        """Persists a changed record in one durable transaction.

        Args:
            record: a record that the store returned, with new values. All its fields but the name
                are written, of its tree only `turns`.
            turns: new or changed turns, parents first. The record's tree has them.

        Returns:
            The record with its current name and revision.

        Raises:
            Stale: another process has changed the session since the record was read.
            SessionBusy: another process generates.
            NotFound: the session was deleted.
        """

    def remove(self, record: SessionRecord) -> None:
        """Deletes the session. Raises NotFound, SessionBusy while another process generates."""

    def records(self, owner: str | None = None) -> list[SessionRecord]:
        """Returns all sessions, or an owner's, with their turns, the last used first."""

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
        """Returns a list of sessions, the last used first, or the best match of a search first.

        Without a search, the time it takes depends on the entries that it returns, not on the
        number of sessions.

        Args:
            owner: None: all owners.
            search: words (prefixes with `*`) of messages, titles and names; None: all sessions.
            tag: only sessions with this tag; None: all.
            without_tag: only sessions without this tag; None: all.
            limit: most entries; None: all.
            after: id of the last session of the page before; None: from the first one. A session
                that is used between two pages moves to the front, so the next page lacks it. All
                others stay in their order; if it is `after` itself, they come again.

        Raises:
            NotFound: there is no session with the id `after`, or a search does not find it.
        """

    def count(self, owner: str) -> int:
        """Returns the number of an owner's sessions, without reading them."""

    def common(self, owner: str, token_ids: Sequence[int]) -> SharedPrefix:
        """Returns what a transcript shares with those of the owner's sessions, unfinished
        generations included. Takes time linear in the transcript, not in the sessions."""

    # --- one turn ------------------------------------------------------------------------------

    def begin(self, record: SessionRecord, start: TurnStart, request: str = "") -> Lease:
        """Takes the session's lease and durably persists the start of a turn. A lease of this
        process is taken over; so is, after a short wait for its release, one without a journal,
        whose turn is acknowledged. `request` is the digest of the client's request that the turn
        answers; empty: it has none.

        Raises:
            SessionBusy: another living process generates; the message names it.
            Stale: as `change()`, and while a dead process's journal is there: `recover()` first.
            NotFound: the session was deleted.
        """

    def journal(self, tokens: Iterable[tuple[Lease, Sequence[int]]]) -> list[Lease]:
        """Appends tokens to the journals of several turns in one transaction, which survives the
        death of the process. Returns what `stops()` does. Raises Stale when a lease is not the
        newest of its session; the tokens of the other leases are persisted nevertheless."""

    def stops(self) -> list[Lease]:
        """Returns the leases of this process whose turns others have asked to stop."""

    def request_stop(self, record: SessionRecord, fencing_token: int) -> None:
        """Asks the process that generates under the lease of this token to stop, as `stops()`
        returns it there. Does nothing once the turn has ended. Raises NotFound."""

    def sync(self) -> None:
        """Returns when all journalled tokens survive a crash of the machine."""

    def finish(self, lease: Lease, record: SessionRecord, turns: Sequence[Turn]) -> SessionRecord:
        """Persists a changed record as `change()` does, and empties the journal. The lease stays
        until `release()`. Raises Stale, NotFound."""

    def release(self, lease: Lease) -> None:
        """Ends the lease and drops a journal that is still there. No error when another process
        has taken the lease over."""

    def unfinished(
        self, record: SessionRecord, *, living: bool = False, skip: int = 0
    ) -> JournalEntry | None:
        """Returns the journal that a dead process, or an earlier generation, left; None while its
        owner lives, unless `living`. The tokens of its first `skip` entries are left out.
        `finish()` under a lease from `recover()` empties it."""

    def recover(self, record: SessionRecord) -> Lease:
        """Takes the lease of a session whose owner died and leaves the journal as it is. Raises
        SessionBusy while the owner lives."""

    # --- requests of clients ------------------------------------------------------------------

    def request(self, record: SessionRecord) -> TurnRequest | None:
        """Returns the client's request that the session's last turn answers, or None. An open one
        of a process that died is "died". Raises NotFound."""

    def mark_request(
        self, record: SessionRecord, fencing_token: int, state: AskedState, again: bool = False
    ) -> None:
        """Changes the state of the request whose turn has, or had, the lease of this token, of a
        settled one only with `again`. This process answers it from now on. Does nothing once the
        session has a newer turn. Raises NotFound."""

    def equal_requests(self, owner: str, digest: str) -> list[str]:
        """Returns the ids of the owner's sessions whose last turn answers such a request that is
        not settled, the newest first, at most 64."""

    # --- small facts ----------------------------------------------------------------------------

    def note(self, key: str, value: Any) -> None:
        """Persists a JSON value whose loss costs nothing, such as measured speeds."""

    def noted(self, key: str) -> Any:
        """Returns the value of a note, None when there is none."""

    def close(self) -> None:
        """Releases the resources of this process. Idempotent."""


def check_text(what: str, text: object) -> None:
    """Raises InvalidRequest unless `text` is a str."""
    if not isinstance(text, str):
        raise wrong(what, text, "a string")


def check_name(name: object) -> None:
    """Raises InvalidRequest unless `name` is printable text that a user can type again."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME
        or name != name.strip()
        or not name.isprintable()
    ):
        expected = f"1 to {MAX_NAME} printable characters without spaces around them"
        raise wrong("name", name, expected)


def taken(name: str) -> InvalidRequest:
    """Returns the error of a session's name that another session of the owner has."""
    return wrong("name", name, "one that is not taken")


def check_tags(tags: object) -> tuple[str, ...]:
    """Returns the tags without repeats. Raises InvalidRequest unless there are at most 256, each of
    1 to 64 printable characters without spaces around them."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise wrong("tags", tags, "a list of strings")
    given = list(itertools.islice(tags, MAX_TAGS + 1))
    if any(not isinstance(tag, str) for tag in given):  # also what cannot be hashed
        raise wrong("tags", given, "a list of strings")
    found = tuple(dict.fromkeys(given))
    if len(found) > MAX_TAGS:
        seen = f"more than {MAX_TAGS} entries"
        raise wrong("tags", found, f"at most {MAX_TAGS}", seen=seen)
    for tag in found:
        place = f"tags[{given.index(tag)}]"
        if not 1 <= len(tag) <= 64 or tag != tag.strip():
            raise wrong(place, tag, "1 to 64 characters, no spaces around")
        if not tag.isprintable():
            raise wrong(place, tag, "printable characters")
    return found


def no_session(session_id: str) -> NotFound:
    """Returns the error of a list that should start after an unknown session."""
    return NotFound(f"no session of the id {shown(session_id)} to continue the list after")


MAX_METADATA = 16  # keys
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512  # characters


def check_metadata(metadata: object) -> dict[str, str]:
    """Returns a copy of the metadata, empty for None. Raises InvalidRequest unless it is a mapping
    of at most 16 keys of 1 to 64 characters to texts of at most 512 (OpenAI's limits)."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise wrong("metadata", metadata, "a mapping from texts to texts")
    if len(metadata) > MAX_METADATA:
        seen = f"a mapping of {len(metadata)} keys"
        raise wrong("metadata", metadata, f"at most {MAX_METADATA}", seen=seen)
    for key, value in metadata.items():
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_METADATA_KEY:
            expected = f"keys that are strings of 1 to {MAX_METADATA_KEY} characters"
            raise wrong("metadata", metadata, expected, seen=f"a mapping with the key {shown(key)}")
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            expected = f"a string of at most {MAX_METADATA_VALUE} characters"
            raise wrong(f"metadata.{key}", value, expected)
    return dict(metadata)


def check_mapping(what: str, given: object) -> dict[str, Any]:
    """Returns a copy of `given`, empty for None. Raises InvalidRequest unless it is a mapping with
    text keys."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise wrong(what, given, "a mapping from names to values")
    return dict(given)
