"""Stored pages of keys and values, without an engine: lists, cleaning up, checks, copies.

A page is the KV of up to 64 tokens. Its key names these tokens and all before them, under a root
that is the model's fingerprint, the adapter and the owner's salt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import turbomind._C as _C
from turbomind.descriptors import telling_of_descriptors
from turbomind.machine import parse_bytes

PAGE_TOKENS = _C.PAGE_TOKENS
PINNED = 2.0  # pages of this retention priority and above are evicted last of all

__all__ = ["PAGE_TOKENS", "PINNED", "Page", "PageStore", "Verified", "page_keys", "root_key"]


def root_key(fingerprint: str, salt: str = "", adapter: int = 0) -> bytes:
    """The parent key of a first page."""
    return _C.root_key(fingerprint, salt, adapter)


def page_keys(
    fingerprint: str, token_ids: Sequence[int], salt: str = "", adapter: int = 0
) -> list[bytes]:
    """Keys of the full pages of `token_ids`, then that of the rest if there is one."""
    return _C.page_keys(fingerprint, token_ids, salt, adapter)


@dataclass(frozen=True)
class Page:
    """One stored page of one cache group.

    `payload` is in canonical order: [layer][K|V][head][token][dim] in the KV dtype, without
    padding, of the heads from `first_head` on. `key` follows from `parent` and `token_ids`.
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
    """Good pages that `PageStore.verify` read, and damaged ones met since the store was opened."""

    good: int
    damaged: int


class PageStore:
    """The folder of pages that engines with `page_folder` write to.

    Several stores and engines, also of other processes, may have one folder open. Any thread.
    What does not verify is forgotten and counted, never returned.

    Args:
        folder: Made when missing, for its owner only.
        quota: Bytes, or a text like "10GiB", above which pages are evicted: those of the lowest
            retention priority and the longest without use first. None: no limit.
        numerics: Numerics fingerprint whose pages are preferred to those of others.
        segment: Bytes of a full segment file. None: 256 MiB, less under a small quota.

    Raises:
        InvalidRequest: The folder cannot be made or read.
    """

    @telling_of_descriptors("the folder of pages")
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
            0 if quota is None else parse_bytes("quota", quota),
            numerics,
            0 if segment is None else parse_bytes("segment", segment),
        )

    def stats(self) -> dict[str, int]:
        """Counts since opening, and what there is.

        pages, segments; bytes (of live pages, headers included), disk_bytes (blocks of the files),
        quota (0: none); reads, writes, evicted; damaged (met and forgotten), write_errors.
        """
        return self._core.stats()

    def contains(self, keys: Iterable[bytes], group: int = 0) -> list[bool]:
        """For each key whether its page is there."""
        return [self._core.contains(key, group) for key in keys]

    def bytes_of(self, keys: Iterable[bytes]) -> int:
        """Bytes that the pages of these keys take, all groups together."""
        return self._core.bytes_of(keys)

    def pages(self) -> list[tuple[bytes, int]]:
        """(key, group) of every page."""
        return self._core.pages()

    def find_prefix(
        self, parent: bytes, token_ids: Sequence[int], group: int = 0
    ) -> tuple[bytes, int] | None:
        """(key, shared tokens) of the page behind `parent` with the longest common beginning."""
        return self._core.find_prefix(parent, token_ids, group)

    def read(self, key: bytes) -> list[Page]:
        """The pages of a key, by group; empty when there is none that verifies."""
        found = (self._core.read(key, group) for group in self._core.groups(key))
        return [Page(**fields) for fields in found if fields is not None]

    def write(self, page: Page) -> bool:
        """True when the store has the page now, or a longer one with the same beginning.

        False: the disk is full or cannot be written, or the quota leaves no room.

        Raises:
            InvalidRequest: A field is out of range, or the key is not that of parent and tokens.
        """
        expected = _C.page_key(page.parent, page.token_ids)
        if page.key != expected:
            raise _C.InvalidRequest(
                f"page.key is {page.key.hex()}, expected {expected.hex()}, which follows from its "
                "parent and token_ids"
            )
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
        """Sets the retention priority, and that the pages were used now."""
        self._core.touch(keys, retention_priority)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes pages of all groups, and the partial pages behind them."""
        self._core.remove(keys)

    def retain_only(self, keys: Iterable[bytes]) -> None:
        """Removes all pages but these and the partial pages behind them."""
        self._core.retain_only(keys)

    def verify(self, progress: Callable[[int, int], object] | None = None) -> Verified:
        """Reads every page; what is damaged is removed. `progress` gets (done, total)."""
        self.refresh()
        good = 0
        pages = self.pages()
        for done, (key, group) in enumerate(pages, start=1):
            good += self._core.verify(key, group)
            if progress is not None:
                progress(done, len(pages))
        return Verified(good, self.stats()["damaged"])

    def maintain(self) -> None:
        """A bounded piece of eviction and compaction."""
        self._core.maintain()

    def refresh(self) -> None:
        """Takes over what other processes have written and removed."""
        self._core.refresh()

    def sync(self) -> None:
        """What was written survives the death of the machine."""
        self._core.sync()

    def close(self) -> None:
        """Gives the segment back and saves when pages were used. Twice is fine."""
        self._core.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
