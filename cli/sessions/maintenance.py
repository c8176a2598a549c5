"""Changes to stored sessions and KV pages: change, pin, fork, delete and garbage collection."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest, NotFound
from lmchat.sessions.branches import forked
from lmchat.store.protocol import Stale, check_name
from lmchat.store.records import SessionRecord, Summary

if TYPE_CHECKING:
    from lmchat.store.protocol import Store

    from .disk_pages import DiskPages

_TRIES = 5  # attempts at a change that races with other processes
_STEPS = 10_000  # steps of compaction, each of bounded size


def change(store: Store, record: SessionRecord, **fields: Any) -> SessionRecord:
    """Stores new values of fields in the current version of a session.

    Returns:
        The stored session.

    Raises:
        SessionBusy: A turn is being generated.
        NotFound: The session was deleted.
        Stale: Other processes changed the session at each of the attempts.
    """
    for _ in range(_TRIES):
        try:
            return store.change(replace(record, **fields))
        except Stale:
            record = store.refresh(record)
    raise Stale(f"session {record.name!r} is being changed by another process; try again")


def touch(pages: DiskPages, record: SessionRecord) -> None:
    """Sets the retention priority of a session's pages on disk, by whether it is pinned."""
    from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION

    if pages.store is not None:
        pages.store.touch(
            pages.keys(record), RETENTION_PINNED if record.pinned else RETENTION_SESSION
        )


def fork(store: Store, old: SessionRecord, name: str | None, at: int | None) -> SessionRecord:
    """Stores a copy of a session, which shares its pages.

    Args:
        store: The store of both sessions.
        old: The session to copy.
        name: Name of the copy; None: the next free default name.
        at: Number of questions to copy with their replies; None: all.

    Returns:
        The copy.
    """
    if name is not None:
        check_name(name)
    try:
        record = forked(old, name, at)
    except InvalidRequest as error:  # the message starts with the option's name
        raise InvalidRequest(f"--{error}") from None
    return store.add_numbered(record) if name is None else store.add(record)


def remove(store: Store, pages: DiskPages, session: Summary) -> int:
    """Deletes a session, also a damaged one, and the pages that no other session of its owner uses.

    Returns:
        The freed bytes.

    Raises:
        SessionBusy: A turn is being generated.
        NotFound: The session was deleted or renamed.
    """
    from lmchat.errors import StoreError
    from lmchat.kv.page_deletion import unfinished
    from lmchat.store.prefixes import ends

    try:
        record = store.find(session.owner, session.name)
    except StoreError:  # damaged: `gc` frees its pages
        record = SessionRecord(session.name, session.owner, "append", id=session.id)
    if record is None:
        raise NotFound(f"session {session.name!r} was deleted or renamed just now")
    transcripts = ends(record) + unfinished(store, record)
    store.remove(record)
    try:
        keys = pages.keys_alone(store, record, transcripts)
    except StoreError:
        return 0  # a damaged session may use the pages: `gc` frees them later
    if not keys or pages.store is None:
        return 0
    freed = pages.store.bytes_of(keys)
    pages.store.remove(keys)
    return freed


@dataclass(frozen=True)
class Freed:
    """Result of a garbage collection.

    Attributes:
        pages: Number of pages that no session uses.
        bytes: Their size.
        disk_bytes: Size by which the files have shrunk.
    """

    pages: int
    bytes: int
    disk_bytes: int


def collect(store: Store, pages: DiskPages, *, dry_run: bool) -> Freed:
    """Removes the pages that no session of any owner uses.

    Args:
        store: The store with all sessions.
        pages: Their pages on disk.
        dry_run: Only count the pages.

    Raises:
        StoreError: A session is damaged, so that its pages are unknown.
    """
    from lmchat.kv.page_deletion import unfinished

    if pages.store is None:
        return Freed(0, 0, 0)
    records = store.records()
    wanted = pages.keys_of_all(records)
    for record in records:
        with contextlib.suppress(NotFound):  # deleted just now
            wanted |= pages.keys_of(record, unfinished(store, record, living=True))
    unused = [key for key, _group in pages.store.pages() if key not in wanted]
    before = pages.store.stats()
    if dry_run:
        return Freed(len(unused), pages.store.bytes_of(set(unused)), 0)
    pages.store.retain_only(wanted)
    after = _compacted(pages)
    return Freed(
        max(0, before["pages"] - after["pages"]),
        max(0, before["bytes"] - after["bytes"]),
        max(0, before["disk_bytes"] - after["disk_bytes"]),
    )


def _compacted(pages: DiskPages) -> dict[str, int]:
    """Runs maintenance until the files no longer shrink; returns the statistics."""
    assert pages.store is not None
    last = pages.store.stats()
    for _ in range(_STEPS):
        pages.store.maintain()
        found = pages.store.stats()
        if found["disk_bytes"] == last["disk_bytes"]:
            return found
        last = found
    return last
