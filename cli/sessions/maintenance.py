"""What the commands do to sessions and pages; how it is told is theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest, NotFound
from lmchat.sessions.branches import forked
from lmchat.store.base import SessionRecord, Stale, Summary, check_name

if TYPE_CHECKING:
    from lmchat.store.base import Store

    from .pages import DiskPages

_TRIES = 5  # of a change that others are faster with
_STEPS = 10_000  # of compaction, each a bounded piece


def change(store: Store, record: SessionRecord, act: Callable[[SessionRecord], None]) -> None:
    """Does `act` to the session as it is by now. Raises SessionBusy, NotFound."""
    for _ in range(_TRIES):
        act(record)
        try:
            store.change(record)
            return
        except Stale:
            store.refresh(record)
    raise Stale(f"session {record.name!r} is being changed by another process all the time")


def touch(pages: DiskPages, record: SessionRecord) -> None:
    """What is on disk of a session is worth as much as its being pinned or not says."""
    from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION

    if pages.store is not None:
        pages.store.touch(
            pages.keys(record), RETENTION_PINNED if record.pinned else RETENTION_SESSION
        )


def fork(store: Store, old: SessionRecord, name: str | None, at: int | None) -> SessionRecord:
    """A new session with the first `at` questions and their replies (None: all), kept under `name`
    (None: the next free one). Its pages are those of the old one."""
    if name is not None:
        check_name(name)
    try:
        record = forked(old, name, at)
    except InvalidRequest as error:  # it begins with the name of what was given
        raise InvalidRequest(f"--{error}") from None
    if name is None:
        store.add_numbered(record)
    else:
        store.add(record)
    return record


def remove(store: Store, pages: DiskPages, session: Summary) -> int:
    """Deletes a session, also a damaged one, and the pages that no other of its owner has. Returns
    the bytes that they took. Raises SessionBusy, NotFound."""
    from lmchat.errors import StoreError
    from lmchat.kv.page_deletion import unfinished
    from lmchat.store.prefixes import ends

    try:
        record = store.find(session.owner, session.name)
    except StoreError:  # damaged: what it had stays for gc
        record = SessionRecord(session.name, session.owner, "keep", id=session.id)
    if record is None:
        raise NotFound(f"session {session.name!r} was deleted or renamed just now")
    transcripts = ends(record) + unfinished(store, record)
    store.remove(record)
    try:
        keys = pages.keys_alone(store, record, transcripts)
    except StoreError:
        return 0  # nobody can tell what others need: all stay, for gc
    if not keys or pages.store is None:
        return 0
    freed = pages.store.bytes_of(keys)
    pages.store.remove(keys)
    return freed


@dataclass(frozen=True)
class Freed:
    """Pages that no session refers to, their bytes, and what of them the disk has back already."""

    pages: int
    bytes: int
    disk_bytes: int


def collect(store: Store, pages: DiskPages, *, dry_run: bool) -> Freed:
    """Removes the pages that no session of any owner refers to. Raises StoreError where a session
    is damaged: nobody knows what it refers to."""
    from lmchat.kv.page_deletion import unfinished

    if pages.store is None:
        return Freed(0, 0, 0)
    records = store.records()
    wanted = pages.keys_of_all(records)
    for record in records:
        with contextlib.suppress(NotFound):  # deleted just now
            wanted |= pages.keys_of(record, unfinished(store, record, living=True))
    going = [key for key, _group in pages.store.pages() if key not in wanted]
    before = pages.store.stats()
    if dry_run:
        return Freed(len(going), pages.store.bytes_of(set(going)), 0)
    pages.store.retain_only(wanted)
    after = _compacted(pages)
    return Freed(
        max(0, before["pages"] - after["pages"]),
        max(0, before["bytes"] - after["bytes"]),
        max(0, before["disk_bytes"] - after["disk_bytes"]),
    )


def _compacted(pages: DiskPages) -> dict[str, int]:
    """Its figures once upkeep changes nothing any more."""
    assert pages.store is not None
    last = pages.store.stats()
    for _ in range(_STEPS):
        pages.store.maintain()
        found = pages.store.stats()
        if found["disk_bytes"] == last["disk_bytes"]:
            return found
        last = found
    return last
