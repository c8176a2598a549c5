"""Sessions between stores and archives: what the command line, the chat and Python call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmchat.archive.archive import Archive, read_archive, write_archive
from lmchat.archive.document import check_vocabulary
from lmchat.archive.pages import ArchivePage, page_places
from lmchat.errors import InvalidRequest
from lmchat.page_size import PAGE_TOKENS
from lmchat.store.protocol import Store, check_name
from lmchat.store.records import SessionRecord, now

if TYPE_CHECKING:
    from turbomind.pages import PageStore

Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What an archive got: the turns of all branches, and pages (of a cache group each)."""

    path: str
    turns: int
    pages: int
    bytes: int


def export_session(
    store: Store,
    page_store: PageStore | None,
    record: SessionRecord,
    path: str | os.PathLike[str],
    force: bool = False,
    *,
    salt: str | None = None,
    say: Say | None = None,
) -> Exported:
    """Writes a session to the file `path`, with the pages that `page_store` has of its branches.

    `salt` is the one of the owner's pages (None: the owner's name). `say` gets a sentence about
    what is left out. Raises InvalidRequest: the file exists and `force` is off, or it cannot be
    written; nothing is left behind then.
    """
    _check_path(path)
    if store.unfinished(record) is not None:
        _tell(say, "a reply that did not end is left out; opening the session keeps it")
    pages = None
    if page_store is not None:
        reason = _no_pages(record, None)
        if reason:
            _tell(say, f"its pages are left out: {reason}")
        else:
            pages = stored_pages(page_store, record, record.owner if salt is None else salt)
    count = write_archive(path, record, pages, force=force)
    target = os.path.expanduser(os.fspath(path))
    return Exported(target, len(record.tree), count, os.path.getsize(target))


def import_session(
    store: Store,
    page_store: PageStore | None,
    path: str | os.PathLike[str],
    name: str | None = None,
    owner: str = "local",
    *,
    salt: str | None = None,
    fingerprint: str | None = None,
    vocab_size: int | None = None,
    say: Say | None = None,
) -> SessionRecord:
    """Takes a session out of an archive into `store`, as a new one of `owner` called `name` (None:
    as in the archive), and its pages into `page_store` where there is one.

    Nothing is kept unless all of the archive verifies, and no other session changes. Pages are left
    out, and `say` is told, where the session's fingerprint is not `fingerprint`: they would serve
    nothing. Who made them is trusted: keys and values cannot be compared with their tokens without
    computing them. `vocab_size` counts for a session of `fingerprint` only.
    Raises InvalidRequest: the file, or the name is taken.
    """
    _check_path(path)
    if name is not None:
        check_name(name)
    archive = read_archive(path, owner=owner)
    record = archive.record
    if vocab_size is not None and fingerprint == record.fingerprint:
        check_vocabulary(record, vocab_size)
    record.name = record.name if name is None else name
    record.imported = True  # the model that it names is a stranger's choice
    record.last_used = min(record.last_used, now())  # the future would be the last used for ever
    if store.find(owner, record.name) is not None:
        raise InvalidRequest(
            f"session name {record.name!r} is taken, expected another one for the import"
        )
    store.add(record)
    if len(archive.pages):
        reason = "no place for them was given" if page_store is None else None
        reason = reason or _no_pages(record, fingerprint)
        if reason is None and page_store is not None:
            reason = _keep_pages(page_store, archive, owner if salt is None else salt)
        if reason:
            _tell(say, f"its pages are left out and will be computed again: {reason}")
    return record


def stored_pages(page_store: PageStore, record: SessionRecord, salt: str) -> Iterator[ArchivePage]:
    """What the store has of all branches, each page once, in the order of an archive."""
    seen: set[bytes] = set()
    for turn, ids in page_places(record):
        for i, key in enumerate(keys_on_disk(page_store, record.fingerprint, ids, salt)):
            if key is None or key in seen:
                continue
            expected = tuple(ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
            for page in sorted(page_store.read(key), key=lambda p: (p.group, p.first_head)):
                tokens = tuple(page.token_ids)
                if tokens != expected[: len(tokens)]:
                    continue  # of another branch, which has it later
                seen.add(key)
                yield ArchivePage(
                    turn, i * PAGE_TOKENS, tokens, page.group, page.numerics, page.first_head,
                    page.heads, page.payload,
                )  # fmt: skip


def keys_on_disk(
    page_store: PageStore, fingerprint: str, ids: list[int], salt: str
) -> list[bytes | None]:
    """For each page of a transcript the key under which the store may have it. Of the unfinished
    one at its end this is the page with the longest common beginning, None: there is none."""
    from turbomind.pages import page_keys, root_key

    # The last token has no keys and values yet, so the last page is an unfinished one.
    full = max(0, len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    keys: list[bytes | None] = list(page_keys(fingerprint, ids[:full], salt))
    if full < len(ids):
        parent = keys[-1] if keys else None
        found = page_store.find_prefix(parent or root_key(fingerprint, salt), ids[full:])
        keys.append(None if found is None else found[0])
    return keys


def _keep_pages(page_store: PageStore, archive: Archive, salt: str) -> str | None:
    """Writes the pages under the owner's keys. Returns why some could not be, None where all were.

    The session is kept already: its pages are a cache, so nothing here is an error.
    """
    from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION
    from turbomind.pages import Page, page_keys, root_key

    record = archive.record
    fingerprint, turn = record.fingerprint, 0
    for page in archive.pages:
        if page.turn != turn:
            turn, ids = page.turn, record.tree.token_ids(page.turn)
            keys = [root_key(fingerprint, salt), *page_keys(fingerprint, ids, salt)]
        place, end = page.start // PAGE_TOKENS, page.start + len(page.token_ids)
        whole = end in (page.start + PAGE_TOKENS, len(ids))
        stored = Page(
            key=keys[place + 1] if whole else page_keys(fingerprint, ids[:end], salt)[-1],
            parent=keys[place],
            token_ids=list(page.token_ids),
            payload=page.payload,
            group=page.group,
            fingerprint=fingerprint,
            numerics=page.numerics,
            first_head=page.first_head,
            heads=page.heads,
            retention_priority=RETENTION_PINNED if record.pinned else RETENTION_SESSION,
        )
        try:
            if not page_store.write(stored):
                return "the page store cannot be written, or is full"
        except InvalidRequest as error:
            return str(error)
    page_store.sync()
    return None


def _no_pages(record: SessionRecord, fingerprint: str | None) -> str | None:
    if not record.fingerprint:
        return "no model has computed it yet"
    if record.adapter:
        return f"it uses the adapter {record.adapter!r}"
    if fingerprint is not None and fingerprint != record.fingerprint:
        return "they are of another model, or of other weights"
    return None


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise InvalidRequest(f"path is {path!r}, expected the path of a file")


def _tell(say: Say | None, text: str) -> None:
    if say is not None:
        say(text)
