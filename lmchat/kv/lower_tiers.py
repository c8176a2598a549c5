"""Access of sessions to the lower tiers (host memory, disk) of an engine.

Without lower tiers all calls succeed at once and do nothing.

Not here: the tiers themselves (`cpp/tiers`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import Error
from lmchat.store.prefixes import PAGE, SharedPrefix
from turbomind import Engine, Flushed, Handle
from turbomind.engine.tiers import parse_quota
from turbomind.params import wrong

if TYPE_CHECKING:
    from turbomind.engine.pages import PageStore


class LowerTiers:
    """The lower tiers of one engine. Any thread may call it.

    Args:
        core: the engine.
        folder: the folder of pages on disk; None: sessions are not persisted.
        quota: largest size of these pages, as in `tier_options()`.
    """

    def __init__(self, core: Engine, folder: Path | None, quota: int | str | None = None) -> None:
        self._core = core
        self._folder = folder
        self._quota = quota
        self.persist = folder is not None
        self._unsaved: set[bytes] = set()  # keys that were reported

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that KV depends on except the tokens."""
        return self._core.fingerprint

    def open(self, salt: str, retention_priority: float) -> Handle:
        """Opens a handle whose pages are written to lower tiers as they are sealed."""
        options = {"persist": True} if self.persist else {}
        return self._core.open(salt, retention_priority, **options)

    def save(self, handle: Handle) -> None:
        """Requests that the handle's unfinished page is written too. Does not wait."""
        if self.persist:
            with contextlib.suppress(Error):  # the engine has closed it, or is closed itself
                handle.save()

    def close(self, handle: Handle, save: bool = True) -> None:
        """Closes the handle; with `save`, what it holds is written to lower tiers."""
        if self.persist and save:
            handle.close(save=True)
        else:
            handle.close()

    def flush(self, seconds: float) -> bool:
        """Waits for all requested writes, at most `seconds`.

        Returns:
            Whether all have ended, successfully or not. True for a failed or closed engine.
        """
        try:
            return not self.persist or self._flush(seconds).ended
        except Error:
            return True

    def _flush(self, seconds: float | None = None) -> Flushed:
        """Flushes the engine's pages. Logs once that pages cannot be saved, until they can."""
        flushed = self._core.flush_pages(seconds)
        if flushed.ended:
            fresh, self._unsaved = set(flushed.unsaved) - self._unsaved, set(flushed.unsaved)
            if fresh:
                logging.getLogger(__name__).warning(
                    "%d pages could not be saved and will be computed again "
                    "(is the disk or its quota full?)",
                    len(fresh),
                )
        return flushed

    def refresh(self) -> None:
        """Makes pages visible that another process has written."""
        if self.persist:
            self._core.refresh_pages()

    @contextlib.contextmanager
    def stored(self, wanted: bool = True) -> Iterator[PageStore | None]:
        """Opens the store of pages on disk, with all requested writes done.

        Yields None without pages on disk, or without `wanted`.
        """
        if self._folder is None or not wanted:
            yield None
            return
        from turbomind.engine.pages import PageStore

        self._flush()
        store = PageStore(self._folder, self._quota)
        try:
            yield store
        finally:
            store.close()

    def keys(
        self, token_ids: Sequence[int], salt: str, common: SharedPrefix | None = None
    ) -> list[bytes]:
        """Returns the block hashes of all pages that a transcript can have.

        These are its full pages, and unfinished ones of each length that start at its first token
        or follow its last full page.

        Args:
            token_ids: the transcript.
            salt: seed of the block hashes.
            common: what other transcripts share; its pages are left out.
        """
        shared = common or SharedPrefix()
        # A session of another model may hold ids outside the vocabulary; no page of it is here.
        if not self.persist or max(token_ids, default=0) >= self._core.vocab_size:
            return []
        length = len(token_ids)
        full = length // PAGE * PAGE
        found = self._core.page_keys(token_ids[:full], salt)[shared.pages :]
        first = range(shared.first + 1, min(PAGE, length + 1))
        last = range(full + shared.last + 1, length + 1)
        for end in {*first, *last}:
            found.append(self._core.page_keys(token_ids[:end], salt)[-1])
        return found

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes the pages of these block hashes from disk."""
        if self.persist:
            self._core.remove_pages(list(keys))


def tier_options(
    folder: Path | None, persist_pages: bool, disk_quota: int | str | None
) -> dict[str, Any]:
    """Returns the engine's options for pages on disk beside the store in `folder`.

    Args:
        folder: the data directory; None: no pages on disk.
        persist_pages: whether pages are written to disk.
        disk_quota: largest size of the pages, in bytes or as a text such as "20GiB"; "auto": the
            engine chooses; None: no limit.

    Raises:
        InvalidRequest: persist_pages is not a bool, or disk_quota is none of these.
    """
    parse_quota("disk_quota", disk_quota)
    if not isinstance(persist_pages, bool):
        raise wrong("persist_pages", persist_pages, "True or False")
    if folder is None or not persist_pages:
        return {}
    return {
        "page_folder": folder / "pages",
        "weights_digests": folder / "digests.json",
        "disk_quota": disk_quota,
    }
