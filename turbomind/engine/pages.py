"""Stored pages of KV, read and written without an engine: lists, removal, checks, copies.

A page (vLLM: block) is the KV of up to 64 tokens. Its key, a block hash, is a chained hash of these
tokens and all before them, under a root made of the model's fingerprint, adapter and owner's salt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import turbomind._C as _C
from turbomind.closing import Closing
from turbomind.config.limits import explain_limits
from turbomind.engine.tiers import parse_quota
from turbomind.machine import parse_bytes
from turbomind.params import wrong

PAGE_TOKENS = _C.PAGE_TOKENS
PINNED = 2.0  # retention priority; pages at or above it are evicted last

__all__ = ["PAGE_TOKENS", "PINNED", "Page", "PageStore", "Verified", "page_keys", "root_key"]


def root_key(fingerprint: str, salt: str = "", adapter: int = 0) -> bytes:
    """Returns the parent key of the first page of a sequence, 16 bytes.

    Args:
        fingerprint: `Engine.fingerprint` of the model.
        salt: Owner of the KV.
        adapter: Number of the adapter, 0 for none.
    """
    return _C.root_key(fingerprint, salt, adapter)


def page_keys(
    fingerprint: str, token_ids: Sequence[int], salt: str = "", adapter: int = 0
) -> list[bytes]:
    """Returns the keys of the full pages of `token_ids`, then that of a partial last page.

    Args:
        fingerprint: `Engine.fingerprint` of the model.
        token_ids: Token ids from the start of a sequence.
        salt: Owner of the KV.
        adapter: Number of the adapter, 0 for none.

    Returns:
        16 bytes per page.
    """
    return _C.page_keys(fingerprint, token_ids, salt, adapter)


@dataclass(frozen=True)
class Page:
    """One stored page of one cache group.

    Attributes:
        key: Block hash, 16 bytes; it follows from `parent` and `token_ids`.
        parent: Block hash of the page before, or `root_key()`.
        token_ids: The page's tokens, 1 to 64.
        payload: KV as [layer][K|V][head][token][dim] in the KV dtype, without padding.
        group: Cache group, a set of layers of one window.
        fingerprint: `Engine.fingerprint` of the model.
        numerics: `Engine.numerics_fingerprint` of the engine that computed it.
        first_head: First KV head of the payload.
        heads: Number of KV heads in the payload.
        retention_priority: Pages of a lower number are evicted first.
    """

    key: bytes
    parent: bytes
    token_ids: list[int]
    payload: bytes
    group: int = 0
    fingerprint: str = ""
    numerics: str = ""
    first_head: int = 0
    heads: int = 0
    retention_priority: float = 0.0


@dataclass(frozen=True)
class Verified:
    """Result of `PageStore.verify`.

    Attributes:
        good: Pages that were read and are whole.
        damaged: Damaged pages found since the store was opened.
    """

    good: int
    damaged: int


class PageStore(Closing):
    """The folder of pages that engines with `page_folder` write to.

    Several stores and engines, also of other processes, may have one folder open. Any thread may
    call. The store drops and counts damaged pages and never returns them.

    Args:
        folder: Folder of the segment files; a missing one is made, readable by its owner only.
        quota: Bytes, as an int or a text like "10GiB", above which pages are evicted: those of the
            lowest retention priority first, of these the least recently used. "auto" and None as in
            `Engine`.
        numerics: Numerics fingerprint whose pages are preferred to those of others.
        segment: Bytes of a full segment file. None: 256 MiB, less under a small quota.

    Raises:
        InvalidRequest: The folder cannot be made or read.
    """

    @explain_limits("the folder of pages")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        quota: int | str | None = None,
        *,
        numerics: str = "",
        segment: int | str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._core = _C.PageStore(
            os.fspath(folder),
            parse_quota("quota", quota),
            numerics,
            0 if segment is None else parse_bytes("segment", segment),
        )

    def stats(self) -> dict[str, int]:
        """Returns counters since opening and the sizes of the store.

        Returns:
            pages, segments; bytes (of live pages, headers included), disk_bytes (blocks of the
            files), quota (0: none); reads, writes, evicted, damaged (found and dropped),
            write_errors.
        """
        return self._core.stats()

    def contains(self, keys: Iterable[bytes], group: int = 0) -> list[bool]:
        """Returns for each key whether the store has its page."""
        return [self._core.contains(key, group) for key in keys]

    def bytes_of(self, keys: Iterable[bytes]) -> int:
        """Returns the bytes that the pages of these keys take, all groups together."""
        return self._core.bytes_of(keys)

    def pages(self) -> list[tuple[bytes, int]]:
        """Returns (key, group) of every page."""
        return self._core.pages()

    def find_prefix(
        self, parent: bytes, token_ids: Sequence[int], group: int = 0
    ) -> tuple[bytes, int] | None:
        """Finds the page after `parent` with the longest common prefix.

        Returns:
            (key, shared tokens), or None.
        """
        return self._core.find_prefix(parent, token_ids, group)

    def read(self, key: bytes) -> list[Page]:
        """Returns the whole pages of a key, by group; an empty list if there is none."""
        found = (self._core.read(key, group) for group in self._core.groups(key))
        return [Page(**fields) for fields in found if fields is not None]

    def write(self, page: Page) -> bool:
        """Writes a page, unless the store has it or a longer one with the same prefix.

        Returns:
            True if the store has the page now, or the longer one. False if the disk is full or
            refuses writes, or the quota leaves no room.

        Raises:
            InvalidRequest: A field is out of range, or the key is not that of parent and tokens.
        """
        expected = _C.page_key(page.parent, page.token_ids)
        if page.key != expected:
            follows = f"{expected.hex()}, which follows from its parent and token_ids"
            raise wrong("page.key", page.key, follows, seen=page.key.hex())
        return self._core.write(
            page.parent,
            page.token_ids,
            page.payload,
            page.group,
            page.fingerprint,
            page.numerics,
            page.first_head,
            page.heads,
            page.retention_priority,
        )

    def touch(self, keys: Iterable[bytes], retention_priority: float) -> None:
        """Sets the retention priority of pages and marks them as used now."""
        self._core.touch(keys, retention_priority)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes pages of all groups, and all pages that follow them."""
        self._core.remove(keys)

    def retain_only(self, keys: Iterable[bytes]) -> None:
        """Removes all pages but these and the partial pages that follow them."""
        self._core.retain_only(keys)

    def evict(self, size: int, needed: Iterable[bytes] = ()) -> int:
        """Evicts pages, those of the lowest retention priority first, of these the least recently
        used, for a disk that is full. It needs no room itself, and waits for nothing but the disk.

        Args:
            size: Bytes to free, at least.
            needed: Keys of pages that stay, together with the pages before them.

        Returns:
            The bytes of the evicted pages; 0 when none was left.
        """
        return self._core.evict(size, needed)

    def verify(self, progress: Callable[[int, int], object] | None = None) -> Verified:
        """Reads every page and removes damaged ones.

        Args:
            progress: Called with (pages done, pages in total) after each page.
        """
        self.refresh()
        good = 0
        pages = self.pages()
        for done, (key, group) in enumerate(pages, start=1):
            good += self._core.verify(key, group)
            if progress is not None:
                progress(done, len(pages))
        return Verified(good, self.stats()["damaged"])

    def maintain(self) -> None:
        """Evicts and compacts for a bounded time; call it now and then."""
        self._core.maintain()

    def refresh(self) -> None:
        """Reads what other processes have written and removed."""
        self._core.refresh()

    def sync(self) -> None:
        """Makes written pages durable against a loss of power (fsync)."""
        self._core.sync()

    def close(self) -> None:
        """Releases the segment and saves the times of use. Idempotent."""
        self._core.close()
