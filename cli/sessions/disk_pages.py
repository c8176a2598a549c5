"""What the disk has of the sessions' keys and values, without an engine."""

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
    from turbomind.pages import PageStore

FOLDER = "pages"  # in the home


class DiskPages:
    """The pages of a home. Nothing is opened, or made, before it is needed. A context manager.

    `wanted` off: nobody looks, and nothing is known.
    """

    def __init__(self, home: Path, wanted: bool = True) -> None:
        self._folder = home / FOLDER
        self._store: PageStore | None = None
        self.wanted = wanted

    @property
    def store(self) -> PageStore | None:
        """What is there; None where there are no pages, or nobody looks."""
        if self._store is None and self.wanted and self._folder.is_dir():
            self.make()
        return self._store

    def make(self) -> PageStore:
        """The store, whose folder is made where there is none."""
        from turbomind.pages import PageStore

        if self._store is None:
            self._store = PageStore(self._folder)
        return self._store

    def bytes_of(self, record: SessionRecord) -> int | None:
        """Bytes that the pages of all its branches take; None: nobody looked."""
        if not self.wanted:
            return None
        return 0 if self.store is None else self.store.bytes_of(self.keys(record))

    def resident(self, record: SessionRecord) -> int | None:
        """Tokens of the transcript, from its beginning on, that the disk has; None: nobody looked.
        Where a model has several cache groups it is the first one's."""
        if not self.wanted:
            return None
        if self.store is None or not _has_pages(record):
            return 0
        from turbomind.pages import PAGE_TOKENS, page_keys, root_key

        ids = record.tree.token_ids(record.leaf)
        keys = page_keys(record.fingerprint, ids, record.owner)
        there = self.store.contains(keys[: len(ids) // PAGE_TOKENS])
        full = there.index(False) if False in there else len(there)
        parent = keys[full - 1] if full else root_key(record.fingerprint, record.owner)
        rest = ids[full * PAGE_TOKENS : (full + 1) * PAGE_TOKENS]
        found = self.store.find_prefix(parent, rest) if rest else None
        return full * PAGE_TOKENS + (found[1] if found else 0)

    def keys(self, record: SessionRecord) -> set[bytes]:
        """Of all pages that its branches have or may have; empty where there are none."""
        return self.keys_of(record, (ids for _turn, ids in page_places(record)))

    def keys_of(self, record: SessionRecord, transcripts: Iterable[list[int]]) -> set[bytes]:
        """Of all pages that transcripts of the session have or may have."""
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
        """Of the pages of a deleted session's transcripts, those that no other of its owner has."""
        if self.store is None or not _has_pages(record):
            return set()
        return keys_alone(store, self.store, record, transcripts)

    def keys_of_all(self, records: Iterable[SessionRecord]) -> set[bytes]:
        """Of several sessions."""
        return {key for record in records for key in self.keys(record)}

    def __enter__(self) -> DiskPages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()


def _has_pages(record: SessionRecord) -> bool:
    return bool(record.fingerprint) and not record.adapter
