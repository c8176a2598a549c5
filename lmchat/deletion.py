"""What a deleted session leaves on disk: nothing that no other session needs."""

from __future__ import annotations

from collections.abc import Iterable

from lmchat.errors import StoreError
from lmchat.rewrite import behind
from lmchat.runtime import Runtime
from lmchat.store import SessionRecord, Store

Transcript = list[int]


def transcripts(record: SessionRecord) -> list[Transcript]:
    """The token ids of all its branches."""
    tree = record.tree
    return [tree.token_ids(turn.id) for turn in tree if not tree.children(turn.id)]


def unfinished(store: Store, record: SessionRecord) -> list[Transcript]:
    """Up to the last token of a reply that a process which died did not end."""
    try:
        entry = store.unfinished(record)
    except StoreError:
        return []
    if entry is None or entry.start is None:
        return []
    start = entry.start
    tree = behind(record, start.past).tree if start.past else record.tree
    if start.parent is not None and start.parent not in tree:  # the session itself is damaged
        return []
    asked = start.user.token_ids if start.user else ()
    return [[*tree.token_ids(start.parent)[: start.keep], *asked, *entry.token_ids]]


def free_pages(runtime: Runtime, record: SessionRecord, found: Iterable[Transcript]) -> None:
    """Frees the pages of a deleted session's transcripts, but those of its owner's others. What
    the session had in use or on its way up is given up before."""
    if not runtime.pages.persist:
        return
    keys = _keys(runtime, found, record.owner)
    if not keys:
        return
    for other in runtime.store.summaries(record.owner):
        try:
            kept = runtime.store.find(other.owner, other.name)
        except StoreError:
            return  # damaged, so its pages cannot be told: all stay, for gc
        if kept is not None and kept.id != record.id:
            keys -= _keys(
                runtime, [*transcripts(kept), *unfinished(runtime.store, kept)], kept.owner
            )
    runtime.pages.remove(keys)


def _keys(runtime: Runtime, found: Iterable[Transcript], owner: str) -> set[bytes]:
    return {key for ids in found for key in runtime.pages.keys(ids, owner)}
