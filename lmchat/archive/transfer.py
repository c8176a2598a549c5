"""Export of a session from a store to an archive, and import.

Not here: the format of archives (`archive`, `document`, `pages`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lmchat.archive.archive import Archive, read_archive, write_archive
from lmchat.archive.document import check_vocabulary
from lmchat.archive.pages import ArchivePage, page_places
from lmchat.errors import InvalidRequest
from lmchat.page_size import PAGE_TOKENS
from lmchat.store.protocol import Store, check_name, taken
from lmchat.store.records import LOCAL_OWNER, Exported, SessionRecord, now
from turbomind.params import wrong

if TYPE_CHECKING:
    from turbomind.engine.pages import PageStore

Notify = Callable[[str], None]


def export_session(
    store: Store,
    page_store: PageStore | None,
    record: SessionRecord,
    path: str | os.PathLike[str],
    force: bool = False,
    *,
    salt: str | None = None,
    notify: Notify | None = None,
) -> Exported:
    """Writes a session to an archive.

    Args:
        store: the store of the session.
        page_store: pages on disk to include; None: no pages.
        record: the session.
        path: the file.
        force: replace a file that exists.
        salt: seed of the owner's block hashes; None: the owner's name.
        notify: called with a sentence about each thing that is left out.

    Raises:
        InvalidRequest: the file exists, or cannot be written. No file is left then.
    """
    _check_path(path)
    if store.unfinished(record) is not None:
        _notify(notify, "an unfinished reply is left out; opening the session recovers it")
    pages = None
    if page_store is not None:
        reason = _no_pages(record, None)
        if reason:
            _notify(notify, f"its pages are left out: {reason}")
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
    owner: str = LOCAL_OWNER,
    *,
    salt: str | None = None,
    fingerprint: str | None = None,
    vocab_size: int | None = None,
    notify: Notify | None = None,
) -> SessionRecord:
    """Adds the session of an archive to a store, and its pages to a page store.

    Nothing is stored unless the whole archive verifies. Pages are trusted: their KV cannot be
    compared with their tokens without computing it.

    Args:
        store: the store to add to.
        page_store: the page store to add to; None: pages are left out.
        path: the file.
        name: name of the new session; None: the name in the archive.
        owner: owner of the new session.
        salt: seed of the owner's block hashes; None: the owner's name.
        fingerprint: the model's fingerprint; pages of another one are left out.
        vocab_size: size of the vocabulary, checked for sessions of `fingerprint`.
        notify: called with a sentence about each thing that is left out.

    Raises:
        InvalidRequest: the archive is bad, or the name is taken.
    """
    _check_path(path)
    if name is not None:
        check_name(name)
    archive = read_archive(path, owner=owner)
    record = archive.record
    if vocab_size is not None and fingerprint == record.fingerprint:
        check_vocabulary(record, vocab_size)
    record = replace(
        record,
        name=record.name if name is None else name,
        imported=True,  # a stranger chose the model that it names
        last_used=min(record.last_used, now()),  # a date in the future would stay the last used
    )
    if store.find(owner, record.name) is not None:
        raise taken(record.name)
    record = store.add(record)
    if len(archive.pages):
        reason = "no place for them was given" if page_store is None else None
        reason = reason or _no_pages(record, fingerprint)
        if reason is None and page_store is not None:
            reason = _write_pages(page_store, archive, owner if salt is None else salt)
        if reason:
            _notify(notify, f"its pages are left out and will be computed again: {reason}")
    return record


def stored_pages(page_store: PageStore, record: SessionRecord, salt: str) -> Iterator[ArchivePage]:
    """Yields the stored pages of all branches, each once, in the order of an archive."""
    seen: set[bytes] = set()
    for turn, ids in page_places(record):
        for i, key in enumerate(keys_on_disk(page_store, record.fingerprint, ids, salt)):
            if key is None or key in seen:
                continue
            expected = tuple(ids[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS])
            for page in sorted(page_store.read(key), key=lambda p: (p.group, p.first_head)):
                tokens = tuple(page.token_ids)
                if tokens != expected[: len(tokens)]:
                    continue  # of another branch, which comes later
                seen.add(key)
                yield ArchivePage(
                    turn, i * PAGE_TOKENS, tokens, page.group, page.numerics, page.first_head,
                    page.heads, page.payload,
                )  # fmt: skip


def keys_on_disk(
    page_store: PageStore, fingerprint: str, ids: list[int], salt: str
) -> list[bytes | None]:
    """Returns the block hash of each page of a transcript, as the store may have it.

    For the unfinished page at the end it is the stored page with the longest common prefix, or
    None.
    """
    from turbomind.engine.pages import page_keys, root_key

    # The last token has no KV yet, so the last page is unfinished.
    full = max(0, len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    keys: list[bytes | None] = list(page_keys(fingerprint, ids[:full], salt))
    if full < len(ids):
        parent = keys[-1] if keys else None
        found = page_store.find_prefix(parent or root_key(fingerprint, salt), ids[full:])
        keys.append(None if found is None else found[0])
    return keys


def _write_pages(page_store: PageStore, archive: Archive, salt: str) -> str | None:
    """Writes the pages under the owner's block hashes.

    The session is stored already and pages are a cache, so a failure is no error.

    Returns:
        Why some pages could not be written, None if all were.
    """
    from lmchat.kv.handle_cache import RETENTION_PINNED, RETENTION_SESSION
    from turbomind.engine.pages import Page, page_keys, root_key

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
        return "they belong to another model, or to other weights"
    return None


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise wrong("path", path, "the path of a file")


def _notify(notify: Notify | None, text: str) -> None:
    if notify is not None:
        notify(text)
