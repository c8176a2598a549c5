"""Removal of the pages of a deleted session that no other session of its owner has.

Not here: removal of the session from its store (`lmchat.store`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmchat.errors import StoreError
from lmchat.store.prefixes import PAGE, Transcript, journalled

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime
    from lmchat.store.protocol import Store
    from lmchat.store.records import SessionRecord
    from turbomind.engine.pages import PageStore


def unfinished(store: Store, record: SessionRecord, *, living: bool = False) -> list[Transcript]:
    """Returns the transcript up to the last journalled token of an unfinished reply, if any.

    Args:
        store: the store of sessions.
        record: the session.
        living: include a reply that a living process is generating.
    """
    try:
        return journalled(record, store.unfinished(record, living=living))
    except StoreError:
        return []


def free_pages(runtime: Runtime, owner: str, found: Iterable[Transcript]) -> None:
    """Removes pages of a deleted session from the engine and the lower tiers.

    Args:
        runtime: the engine's runtime.
        owner: owner of the session; pages that other sessions of the owner share stay.
        found: the transcripts of the session.
    """
    if not runtime.pages.persist:
        return
    keys: set[bytes] = set()
    try:
        for ids in found:
            keys.update(runtime.pages.keys(ids, owner, runtime.store.common(owner, ids)))
    except StoreError:
        return  # what others need is unknown: all pages stay, for gc
    if keys:
        runtime.pages.remove(keys)


def keys_alone(
    store: Store, pages: PageStore, record: SessionRecord, found: Iterable[Transcript]
) -> set[bytes]:
    """Returns the block hashes of pages on disk that only a deleted session has.

    Works without an engine.

    Args:
        store: the store, from which the session is already removed.
        pages: the pages on disk.
        record: the deleted session.
        found: its transcripts.
    """
    from turbomind.engine.pages import page_keys, root_key

    alone: set[bytes] = set()
    for ids in found:
        computed = ids[:-1]  # the last token has no KV yet
        common = store.common(record.owner, computed)
        full = len(computed) // PAGE
        root = root_key(record.fingerprint, record.owner)
        keys = [root, *page_keys(record.fingerprint, computed[: full * PAGE], record.owner)]
        wanted = {*keys[: common.pages + 1]}
        for end in common.ends:  # a page may serve others with its first tokens
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
    """Returns whether the page after these tokens is a full one of another transcript, which only
    starts with the tokens that the deleted one ended with."""
    held = next(iter(pages.read(key)), None)
    if held is None or len(held.token_ids) < PAGE:
        return False
    return store.common(owner, [*before, *held.token_ids]).pages > len(before) // PAGE
