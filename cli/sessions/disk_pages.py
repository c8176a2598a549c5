"""Reads the KV pages of sessions on disk, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.archive.pages import page_places
from lmchat.archive.transfer import keys_on_disk
from lmchat.kv.page_deletion import keys_alone

if TYPE_CHECKING:
    from lmchat.store.protocol import Store
    from lmchat.store.records import SessionRecord
    from turbomind.engine.pages import PageStore

FOLDER = "pages"  # in the data directory


class DiskPages:
    """The KV pages of a data directory, opened on first use. A context manager.

    Args:
        data_dir: The data directory.
        wanted: Read the pages; otherwise all results are unknown (None).
    """

    def __init__(self, data_dir: Path, wanted: bool = True) -> None:
        self._folder = data_dir / FOLDER
        self._store: PageStore | None = None
        self.wanted = wanted

    @property
    def store(self) -> PageStore | None:
        """The page store; None if there is none, or pages are not wanted."""
        if self._store is None and self.wanted and self._folder.is_dir():
            self.make()
        return self._store

    def make(self) -> PageStore:
        """Opens the page store; creates its folder if needed."""
        from turbomind.engine.pages import PageStore

        if self._store is None:
            self._store = PageStore(self._folder)
        return self._store

    def bytes_of(self, record: SessionRecord) -> int | None:
        """Returns the size of the pages of all branches of a session; None if unknown."""
        if not self.wanted:
            return None
        return 0 if self.store is None else self.store.bytes_of(self.keys(record))

    def resident(self, record: SessionRecord) -> int | None:
        """Returns the longest prefix of the transcript that is on disk, in tokens; None if unknown.

        For a model with several cache groups, the prefix is that of the first group.
        """
        if not self.wanted:
            return None
        if self.store is None or not _has_pages(record):
            return 0
        from turbomind.engine.pages import PAGE_TOKENS, page_keys, root_key

        ids = record.tree.token_ids(record.leaf)
        keys = page_keys(record.fingerprint, ids, record.owner)
        stored = self.store.contains(keys[: len(ids) // PAGE_TOKENS])
        full = stored.index(False) if False in stored else len(stored)
        parent = keys[full - 1] if full else root_key(record.fingerprint, record.owner)
        rest = ids[full * PAGE_TOKENS : (full + 1) * PAGE_TOKENS]
        found = self.store.find_prefix(parent, rest) if rest else None
        return full * PAGE_TOKENS + (found[1] if found else 0)

    def keys(self, record: SessionRecord) -> set[bytes]:
        """Returns the block hashes of all pages that the branches of a session may have."""
        return self.keys_of(record, (ids for _turn, ids in page_places(record)))

    def keys_of(self, record: SessionRecord, transcripts: Iterable[list[int]]) -> set[bytes]:
        """Returns the block hashes of all pages that transcripts of a session may have."""
        if self.store is None or not _has_pages(record):
            return set()
        return {
            key
            for ids in transcripts
            for key in keys_on_disk(self.store, record.fingerprint, ids, record.owner)
            if key is not None
        }

    def keys_alone(
        self, store: Store, record: SessionRecord, transcripts: Iterable[list[int]]
    ) -> set[bytes]:
        """Returns the block hashes of a deleted session that no other session of its owner uses."""
        if self.store is None or not _has_pages(record):
            return set()
        return keys_alone(store, self.store, record, transcripts)

    def keys_of_all(self, records: Iterable[SessionRecord]) -> set[bytes]:
        """Returns the block hashes of several sessions."""
        return {key for record in records for key in self.keys(record)}

    def __enter__(self) -> DiskPages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()


def _has_pages(record: SessionRecord) -> bool:
    return bool(record.fingerprint) and not record.adapter
