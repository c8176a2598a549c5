"""What a deleted session leaves on disk: nothing that no other session needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmchat.errors import StoreError
from lmchat.store.prefixes import PAGE, Transcript, journalled

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime
    from lmchat.store.protocol import Store
    from lmchat.store.records import SessionRecord
    from turbomind.pages import PageStore


def unfinished(store: Store, record: SessionRecord, *, living: bool = False) -> list[Transcript]:
    """Up to the last token of a reply that a process which died did not end; `living`: or that a
    process is at."""
    try:
        return journalled(record, store.unfinished(record, living=living))
    except StoreError:
        return []


def free_pages(runtime: Runtime, owner: str, found: Iterable[Transcript]) -> None:
    """Frees the pages of the transcripts of a session that was deleted, but those of its owner's
    others. What the session had in use or on its way up is given up before."""
    if not runtime.pages.persist:
        return
    keys: set[bytes] = set()
    try:
        for ids in found:
            keys.update(runtime.pages.keys(ids, owner, runtime.store.common(owner, ids)))
    except StoreError:
        return  # nobody can tell what others need: all stay, for gc
    if keys:
        runtime.pages.remove(keys)


def keys_alone(
    store: Store, pages: PageStore, record: SessionRecord, found: Iterable[Transcript]
) -> set[bytes]:
    """Of the pages on disk, without an engine, that transcripts of a deleted session had and no
    other of its owner has."""
    from turbomind.pages import page_keys, root_key

    alone: set[bytes] = set()
    for ids in found:
        computed = ids[:-1]  # the last token has no keys and values yet
        common = store.common(record.owner, computed)
        full = len(computed) // PAGE
        root = root_key(record.fingerprint, record.owner)
        keys = [root, *page_keys(record.fingerprint, computed[: full * PAGE], record.owner)]
        wanted = {*keys[: common.pages + 1]}
        for end in common.ends:  # a page may serve others with its beginning
            other = pages.find_prefix(keys[common.pages], ids[common.pages * PAGE : end - 1])
            wanted.update([other[0]] if other else [])
        alone.update({*keys} - wanted)
        before, rest = computed[: full * PAGE], computed[full * PAGE :]
        last = pages.find_prefix(keys[-1], rest)
        if last is None or last[1] <= common.last or last[0] in wanted:
            continue
        if not _is_shared(store, pages, record.owner, before, last[0]):
            alone.add(last[0])
    return alone


def _is_shared(store: Store, pages: PageStore, owner: str, before: Transcript, key: bytes) -> bool:
    """Whether the page behind these tokens is a full one that another transcript has: one that only
    begins as the deleted one ended."""
    held = next(iter(pages.read(key)), None)
    if held is None or len(held.token_ids) < PAGE:
        return False
    return store.common(owner, [*before, *held.token_ids]).pages > len(before) // PAGE
