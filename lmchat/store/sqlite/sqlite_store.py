"""`SqliteStore`: the durable store of sessions, shared by processes.

Not here: the SQL of its tables (`tables`, `journal`, `prefix_table`, `search`) and its file
(`database`).
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lmchat.errors import InvalidRequest, SessionBusy, StoreError
from lmchat.store.data_directory import DATABASE, private_folder
from lmchat.store.prefixes import SharedPrefix
from lmchat.store.protocol import Stale, check_name, taken
from lmchat.store.records import (
    AskedState,
    JournalEntry,
    Lease,
    SessionRecord,
    Summary,
    TurnRequest,
    TurnStart,
    not_before,
)
from lmchat.store.sqlite import (
    codec,
    journal,
    owners,
    prefix_table,
    requests,
    rows,
    running,
    search_index,
    tables,
    verify,
)
from lmchat.store.sqlite.database import Database, after_fork
from lmchat.store.sqlite.search import Lists, Tags
from lmchat.store.turns import Turn
from turbomind.config.limits import explain_limits

RELEASE_SECONDS = 0.25
"""Longest wait in `begin()` for an owner that still writes the KV pages of its last turn."""

_POLL_SECONDS = 0.005  # between two looks whether such a lease was released


P = ParamSpec("P")
Result = TypeVar("Result")


def _making_room(
    method: Callable[Concatenate[SqliteStore, P], Result],
) -> Callable[Concatenate[SqliteStore, P], Result]:
    """Returns a method that writes, and on a full disk does so after pages of KV were removed."""

    @functools.wraps(method)
    def call(self: SqliteStore, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._database.with_room(lambda: method(self, *args, **kwargs))

    return call


class SqliteStore:
    """A `Store` of sessions in `sessions.db` of a data directory. For any thread and several
    processes.

    Each open store owns its leases: two stores in one process are two owners. In a forked child the
    store continues as another owner, with its own connections. A session whose rows are damaged
    raises StoreError with its name; `remove()` deletes it, given a record with its id.

    Args:
        data_dir: the data directory; it is created if missing.

    Raises:
        StoreError: the directory or the file cannot be used.
    """

    @explain_limits("the store of sessions")
    def __init__(self, data_dir: Path | str) -> None:
        self.data_dir = Path(data_dir).absolute()
        private_folder(self.data_dir)
        self._database = database = Database(self.data_dir / DATABASE)
        database.needed_pages = functools.partial(running.needed_pages, database)
        self._holding = owners.Holding(self.data_dir / "owners")
        self._finalizer = weakref.finalize(self, _close, self._database, self._holding)
        after_fork(self)
        self._read_state()

    def close(self) -> None:
        """Closes the file and ends the leases of this store. Their journals stay."""
        self._finalizer()

    def _read_state(self) -> None:
        """Reads what earlier processes have left: the time of the last use, and deletions whose
        words are still in the search index."""
        with self._database.reading() as connection:
            newest = tables.newest_use(connection)
            is_noted = search_index.is_noted(connection)
        if newest is not None:
            not_before(newest)
        if is_noted and self._database.can_write:
            self._database.deleted(here=False)

    def abandon(self) -> None:
        """Abandons connections and leases in a forked child: they are the parent's."""
        self._database.abandon()
        self._holding.abandon()

    # --- sessions ----------------------------------------------------------------------------

    def find(self, owner: str, name: str) -> SessionRecord | None:
        """Returns a new record of the session with its turns, or None."""
        with self._database.reading() as connection:
            row = tables.row_named(connection, owner, name)
            return None if row is None else tables.load(connection, row)

    def find_by_id(self, owner: str, session_id: str) -> SessionRecord | None:
        """Returns a new record of the owner's session of this id with its turns, or None."""
        with self._database.reading() as connection:
            row = tables.row_of_id(connection, owner, session_id)
            return None if row is None else tables.load(connection, row)

    @_making_room
    def add(self, record: SessionRecord) -> SessionRecord:
        """Adds a new session with its turns and returns its record.

        Raises InvalidRequest where the name is taken or invalid.
        """
        check_name(record.name)
        with self._database.writing() as connection:
            self._drop_abandoned(connection, record.owner)
            tables.insert(connection, record)
        return replace(record, revision=1)

    @_making_room
    def add_numbered(self, record: SessionRecord) -> SessionRecord:
        """Adds a session and returns its record. If its name is empty or taken, it gets the next
        free one of "chat-1", "chat-2"...

        A session without a question whose process is killed before its first turn is in no list,
        and the next `add()` deletes it.
        """
        name = record.name
        with self._database.writing() as connection:
            self._drop_abandoned(connection, record.owner)
            if not name or tables.row_named(connection, record.owner, name) is not None:
                name = f"chat-{tables.free_number(connection, record.owner)}"
            check_name(name)
            added = replace(record, name=name, revision=1)
            key = tables.insert(connection, added)
            if not any(turn.role == "user" for turn in added.tree):
                journal.mark_new(connection, key, self._holding.maker())
        return added

    def _drop_abandoned(self, connection: sqlite3.Connection, owner: str) -> None:
        living = self._living_owners()
        for key, maker in journal.new_ones(connection, owner):
            if not living(maker):
                tables.delete(connection, key)
                self._database.deleted()

    def refresh(self, record: SessionRecord) -> SessionRecord:
        """Reads what other writers have changed since.

        Returns:
            The session's record: the given one if there was no change.

        Raises:
            NotFound: the session was deleted.
        """
        with self._database.reading() as connection:
            row = tables.row_of(connection, record)
            if row.revision == record.revision:
                return record
            return tables.updated(connection, row, record)

    @_making_room
    def rename(self, record: SessionRecord, name: str) -> SessionRecord:
        """Renames the session and returns its record. This makes no writer stale, so it works
        during generation too.

        Raises InvalidRequest where the name is taken, NotFound.
        """
        check_name(name)
        with self._database.writing() as connection:
            row = tables.row_of(connection, record)
            if tables.row_named(connection, record.owner, name) is not None:
                raise taken(name)
            revision = tables.rename(connection, row, name)
            journal.unmark(connection, row.key)
        is_current = record.revision == row.revision
        return replace(record, name=name, revision=revision if is_current else record.revision)

    @_making_room
    def change(self, record: SessionRecord, turns: Sequence[Turn] = ()) -> SessionRecord:
        """Stores the record's fields and new or changed turns in one durable transaction.

        The name is not stored: the returned record has the current one.

        Args:
            record: the session with its new values; its tree has the turns.
            turns: new and changed turns, parents first.

        Raises:
            Stale: another writer has changed the session since.
            SessionBusy: another process generates on it.
            NotFound: it was deleted.
        """
        values, blobs = rows.session_values(record), [rows.turn_values(turn) for turn in turns]
        begun = prefix_table.change_of(record, turns)
        with self._database.writing() as connection:
            row = tables.row_of(connection, record)
            self._check_not_generating(connection, row, record)
            _check_fresh(row, record)
            record = tables.used(connection, row, record)
            values |= rows.use_values(record.last_used)
            revision = tables.write(connection, row, values, blobs, begun)
            journal.unmark(connection, row.key)
        return replace(record, name=codec.decode(row.name), revision=revision)

    def remove(self, record: SessionRecord) -> None:
        """Deletes the session, also on a full disk. As `begin()` it waits for pages of KV that
        another owner writes, so that they can be deleted too.

        Raises NotFound where it is gone, SessionBusy while another process generates on it.
        """

        def delete() -> None:
            with self._database.writing() as connection:
                row = tables.any_row_of(connection, record)
                self._check_not_generating(connection, row, record)
                tables.delete(connection, row.key)

        with contextlib.suppress(StoreError):  # a damaged session can be deleted
            self._await_release(record)
        self._database.deleting(delete)

    def records(self, owner: str | None = None) -> list[SessionRecord]:
        """Returns all sessions with their turns, or those of one owner, the last used first."""
        with self._database.reading() as connection:
            found = (tables.row_of_key(connection, k) for k in tables.keys(connection, owner))
            return [tables.load(connection, row) for row in found if row is not None]

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
        """Returns summaries of sessions, the last used first, or the best match of `search` first.

        A search finds words (prefixes with `*`) of messages, titles and names. `after` is the id
        of the last session of the page before. Raises NotFound where that is unknown.
        """
        with self._database.reading() as connection:
            lists = Lists(connection, self._living_owners())
            if search is None:
                return lists.newest(owner, Tags(tag, without_tag), limit, after)
            return lists.found(search, owner, Tags(tag, without_tag), limit, after)

    def count(self, owner: str) -> int:
        """Returns the number of an owner's sessions, from an index."""
        with self._database.reading() as connection:
            return tables.count(connection, owner)

    def common(self, owner: str, token_ids: Sequence[int]) -> SharedPrefix:
        """Returns the prefix that a transcript shares with those of the owner's sessions.

        Unfinished generations count too. Only their sessions are read; an index has the rest.
        """
        with self._database.reading() as connection:
            found = prefix_table.common(connection, owner, token_ids)
            for key in journal.begun(connection, owner):
                for other in running.transcripts(connection, key):
                    found.compare(token_ids, other)
        return found

    # --- one turn ----------------------------------------------------------------------------

    @_making_room
    def begin(self, record: SessionRecord, start: TurnStart, request: str = "") -> Lease:
        """Takes the session's lease and durably stores the start of a turn.

        A lease that this store holds already is replaced. A lease of another owner without a
        journal belongs to an acknowledged turn whose pages are being written: its release is
        awaited for at most `RELEASE_SECONDS`, so that the pages can be loaded, then it is taken.

        Args:
            record: the session.
            start: the turn.
            request: digest of the client's request that the turn answers; empty: it has none.

        Raises:
            SessionBusy: another living owner generates; the message names it.
            Stale: the session has changed, or has the journal of a dead process.
            NotFound: it was deleted.
        """
        blob = rows.start_blob(start)
        self._await_release(record)
        with self._database.writing() as connection:
            row = tables.row_of(connection, record)
            before = journal.holder(connection, row.key)[1]
            has_journal = journal.is_there(connection, row.key)
            self._check_not_generating(connection, row, record)
            lease = self._acquire(connection, row, record)
            _check_fresh(row, record)
            if has_journal and before != self._holding.token:
                raise Stale(f"session {record.name!r} has a reply of a process that died")
            made = {turn.id for turn in start.past}
            known = [i for i in (start.parent, start.extends) if i not in made]
            tables.check_stored(connection, row.key, *known)
            journal.start(connection, row.key, blob)
            token, owner = lease.fencing_token, self._holding.owner().token
            requests.begin(connection, row.key, token, owner, request, start.reply_id)
        return lease

    def journal(self, tokens: Iterable[tuple[Lease, Sequence[int]]]) -> list[Lease]:
        """Appends tokens to the journals of several turns in one transaction.

        It survives the death of the process.

        Returns:
            As `stops()`.

        Raises:
            Stale: leases are not the newest of their sessions; the others are stored.
        """
        entries = list(tokens)
        return self._database.with_room(lambda: self._journal(entries))

    def _journal(self, entries: list[tuple[Lease, Sequence[int]]]) -> list[Lease]:
        stale: list[Lease] = []
        with self._database.writing(durable=False) as connection:
            for lease, token_ids in entries:
                key = self._held(connection, lease)
                if key is None:
                    stale.append(lease)
                else:
                    journal.append(connection, key, token_ids)
            stops = self._stops(connection)
        if stale:
            raise Stale(f"the lease of session {stale[0].session} was taken over")
        return stops

    def stops(self) -> list[Lease]:
        """Returns the leases of this store whose turns other processes have asked to stop."""
        with self._database.reading() as connection:
            return self._stops(connection)

    def _stops(self, connection: sqlite3.Connection) -> list[Lease]:
        token = self._holding.token
        return [] if token is None else journal.stops(connection, token)

    @_making_room
    def request_stop(self, record: SessionRecord, fencing_token: int) -> None:
        """Asks the process that generates under the lease of this token to stop. Does nothing once
        the turn has ended. The request is not synced: a crash ends the turn too.

        Raises:
            NotFound: the session was deleted.
        """
        with self._database.writing(durable=False) as connection:
            key = tables.row_of(connection, record).key
            journal.request_stop(connection, key, fencing_token)
            owner = self._holding.owner().token
            requests.mark(connection, key, fencing_token, "settled", owner)

    def sync(self) -> None:
        """Makes all journalled tokens survive a power cut."""
        self._database.sync()

    @_making_room
    def finish(self, lease: Lease, record: SessionRecord, turns: Sequence[Turn]) -> SessionRecord:
        """Durably stores `turns`, parents first, and the record's fields, and empties the journal.

        The turn is acknowledged by that. The lease stays until `release()`. Raises Stale.
        """
        values, blobs = rows.session_values(record), [rows.turn_values(turn) for turn in turns]
        begun = prefix_table.change_of(record, turns)
        with self._database.writing() as connection:
            key = self._held(connection, lease)
            if key is None or lease.session != record.id:
                raise Stale(f"the lease of session {record.name!r} was taken over")
            row = tables.row_of(connection, record)
            _check_fresh(row, record)
            record = tables.used(connection, row, record)
            values |= rows.use_values(record.last_used)
            revision = tables.write(connection, row, values, blobs, begun)
            requests.end(connection, key, lease.fencing_token)
            journal.clear(connection, key)
        return replace(record, name=codec.decode(row.name), revision=revision)

    @_making_room
    def release(self, lease: Lease) -> None:
        """Releases the lease and drops what is left of its journal.

        A lease that was taken over is no error. The release is not synced: leases of dead
        processes end in any case.
        """
        with self._database.writing(durable=False) as connection:
            key = self._held(connection, lease)
            if key is not None:
                journal.clear(connection, key)
                journal.release(connection, key)

    def unfinished(
        self, record: SessionRecord, *, living: bool = False, skip: int = 0
    ) -> JournalEntry | None:
        """Returns the journal that a dead process left in the session, or None.

        Args:
            record: the session.
            living: return the journal of a living owner too.
            skip: number of first entries of the journal that are not read.

        Raises:
            NotFound: the session was deleted.
            StoreError: the journal is damaged, or of a newer version.
        """
        with self._database.reading() as connection:
            row = tables.row_of(connection, record)
            fencing_token, owner = journal.holder(connection, row.key)
            if not living and owner is not None and self._who(owner) is not None:
                return None
            try:
                entry = journal.read(connection, row.key, skip)
                return entry and replace(entry, fencing_token=fencing_token)
            except tables.DAMAGE as error:
                raise rows.damaged(record.name, error) from error

    @_making_room
    def recover(self, record: SessionRecord) -> Lease:
        """Takes the lease of a session whose owner died. The journal stays as it is.

        Raises SessionBusy while the owner lives elsewhere, NotFound.
        """
        with self._database.writing() as connection:
            row = tables.row_of(connection, record)
            return self._take(connection, row, record)

    # --- requests of clients -----------------------------------------------------------------

    def request(self, record: SessionRecord) -> TurnRequest | None:
        """Returns the client's request that the session's last turn answers, or None. An open one
        of a process that died is "died"."""
        with self._database.reading() as connection:
            found = requests.read(connection, tables.row_of(connection, record).key)
        if found is None:
            return None
        request, owner = found
        if owner == self._holding.token:
            return replace(request, is_own=True)
        is_dead = request.state == "open" and self._who(owner) is None
        return replace(request, state="died") if is_dead else request

    @_making_room
    def mark_request(
        self, record: SessionRecord, fencing_token: int, state: AskedState, again: bool = False
    ) -> None:
        """Changes the state of the request whose turn has, or had, the lease of this token, of a
        settled one only with `again`. This process answers it from now on. Not synced: a crash ends
        the connections of clients too. Raises NotFound."""
        with self._database.writing(durable=False) as connection:
            key = tables.any_row_of(connection, record).key
            owner = self._holding.owner().token
            requests.mark(connection, key, fencing_token, state, owner, again)

    def equal_requests(self, owner: str, digest: str) -> list[str]:
        """Returns the ids of the owner's sessions whose last turn answers such a request that is
        not settled, the newest first, at most 64."""
        with self._database.reading() as connection:
            return requests.equal(connection, owner, digest)

    # --- small facts -------------------------------------------------------------------------

    @_making_room
    def note(self, key: str, value: Any) -> None:
        """Stores a JSON value whose loss does no harm. Not synced."""
        try:
            blob = codec.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{key} cannot be noted: {error}") from None
        with self._database.writing(durable=False) as connection:
            connection.execute(
                "INSERT INTO notes (key, value) VALUES (?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (codec.column(key), codec.seal(blob, key)),
            )

    def noted(self, key: str) -> Any:
        """Returns the value of `note()`; None where it is missing or damaged."""
        with self._database.reading() as connection:
            found = connection.execute(
                "SELECT value FROM notes WHERE key = ?", (codec.column(key),)
            )
            row = found.fetchone()
        try:
            return None if row is None else codec.loads(codec.unseal(row[0], key))
        except ValueError:
            return None

    def verify(self, progress: verify.Progress | None = None) -> list[str]:
        """Verifies the file, the search index and each session. Returns one sentence per problem.

        Args:
            progress: called with the number of verified sessions and of all sessions.
        """
        return verify.problems(self._database, progress)

    # --- leases ------------------------------------------------------------------------------

    def _take(self, connection: sqlite3.Connection, row: rows.Row, record: SessionRecord) -> Lease:
        self._check_not_elsewhere(journal.holder(connection, row.key)[1], record)
        return self._acquire(connection, row, record)

    def _acquire(
        self, connection: sqlite3.Connection, row: rows.Row, record: SessionRecord
    ) -> Lease:
        return Lease(record.id, journal.acquire(connection, row.key, self._holding.owner().token))

    def _await_release(self, record: SessionRecord) -> None:
        """Waits, outside any transaction, while another owner writes the pages of its last turn."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while self._is_ending_elsewhere(record) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _is_ending_elsewhere(self, record: SessionRecord) -> bool:
        """Returns whether another living owner has the lease of an acknowledged turn."""
        with self._database.reading() as connection:
            row = tables.row_of(connection, record)
            owner = journal.holder(connection, row.key)[1]
            if owner is None or owner == self._holding.token:
                return False
            if journal.is_there(connection, row.key):
                return False
        return self._who(owner) is not None

    def _held(self, connection: sqlite3.Connection, lease: Lease) -> int | None:
        token = self._holding.token
        return None if token is None else journal.held(connection, lease, token)

    def _check_not_generating(
        self, connection: sqlite3.Connection, row: rows.Row, record: SessionRecord
    ) -> None:
        """Raises SessionBusy while another living owner generates. One that has a lease without a
        journal does not: its turn is acknowledged, and it writes pages of KV."""
        if journal.is_there(connection, row.key):
            self._check_not_elsewhere(journal.holder(connection, row.key)[1], record)

    def _check_not_elsewhere(self, owner: str | None, record: SessionRecord) -> None:
        if owner is not None and owner != self._holding.token:
            who = self._who(owner)
            if who is not None:
                raise SessionBusy(
                    f"session {record.name!r} is generating in {who}: try again when that has ended"
                )

    def _who(self, owner: str) -> str | None:
        return owners.living(self._holding.folder, owner)

    def _living_owners(self) -> Callable[[str], str]:
        known: dict[str, str] = {}

        def busy(owner: str) -> str:
            if owner not in known:
                known[owner] = self._who(owner) or ""
            return known[owner]

        return busy


def _close(database: Database, holding: owners.Holding) -> None:
    if holding.has_made and holding.token is not None:
        with contextlib.suppress(StoreError), database.writing(durable=False) as connection:
            journal.unmark_all(connection, holding.token)
    database.close()
    holding.close()


def _check_fresh(row: rows.Row, record: SessionRecord) -> None:
    if not row.changed <= record.revision <= row.revision:
        raise Stale(
            f"session {record.name!r} is at revision {row.revision}, the record at "
            f"{record.revision}: another process changed it"
        )
