"""What a deleted session leaves on disk: nothing that no other session needs."""

from __future__ import annotations

from lmchat.errors import StoreError
from lmchat.runtime import Runtime
from lmchat.store import SessionRecord


def free_pages(runtime: Runtime, record: SessionRecord) -> None:
    """Frees the pages of all branches of a deleted session, but those of its owner's others."""
    keys = _keys(runtime, record)
    if not keys:
        return
    for other in runtime.store.summaries(record.owner):
        try:
            found = runtime.store.find(other.owner, other.name)
        except StoreError:
            return  # damaged, so its pages cannot be told: all stay, for gc
        if found is not None and found.id != record.id:
            keys -= _keys(runtime, found)
    runtime.pages.remove(keys)


def _keys(runtime: Runtime, record: SessionRecord) -> set[bytes]:
    found: set[bytes] = set()
    if runtime.pages.persist:
        for turn in record.tree:
            if not record.tree.children(turn.id):
                found.update(runtime.pages.keys(record.tree.token_ids(turn.id), record.owner))
    return found
