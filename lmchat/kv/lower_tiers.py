"""What sessions ask of the tiers below the engine's memory: the one file that knows how.

An engine without them has nothing below: everything is down at once and nothing is ever loaded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import Error, InvalidRequest
from lmchat.store.prefixes import PAGE, Common
from turbomind import Engine, Flushed, Handle

if TYPE_CHECKING:
    from turbomind.pages import PageStore


class LowerTiers:
    """The tiers of one engine. `folder`: where pages of sessions are kept on disk, None: nowhere.
    Any thread."""

    def __init__(self, core: Engine, folder: Path | None) -> None:
        self._core = core
        self._folder = folder
        self.persist = folder is not None
        self._unsaved: set[bytes] = set()  # keys that were told of

    @property
    def fingerprint(self) -> str:
        """What keys and values depend on, but the tokens."""
        return self._core.fingerprint

    def open(self, salt: str, retention_priority: float) -> Handle:
        """A handle whose pages go down as they are sealed."""
        options = {"persist": True} if self.persist else {}
        return self._core.open(salt, retention_priority, **options)

    def save(self, handle: Handle) -> None:
        """Posts that the handle's unfinished page goes down too."""
        if self.persist:
            with contextlib.suppress(Error):  # the engine has lost it, or is closed
                handle.save()

    def close(self, handle: Handle, save: bool = True) -> None:
        """Closes the handle; with `save` what it holds goes down."""
        if self.persist and save:
            handle.close(save=True)
        else:
            handle.close()

    def flush(self, seconds: float) -> bool:
        """Waits until what was posted is down; whether it has ended, with pages that could not be
        saved or without. An engine that has failed or was closed has nothing left to wait for."""
        try:
            return not self.persist or self._flush(seconds).ended
        except Error:
            return True

    def _flush(self, seconds: float | None = None) -> Flushed:
        """As the engine's; logs once that pages cannot be saved, until they can."""
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
        """Another process has written pages."""
        if self.persist:
            self._core.refresh_pages()

    @contextlib.contextmanager
    def stored(self, wanted: bool = True) -> Iterator[PageStore | None]:
        """The pages on disk, all that was posted among them; None where there are none."""
        if self._folder is None or not wanted:
            yield None
            return
        from turbomind.pages import PageStore

        self._flush()
        store = PageStore(self._folder)
        try:
            yield store
        finally:
            store.close()

    def keys(
        self, token_ids: Sequence[int], salt: str, common: Common | None = None
    ) -> list[bytes]:
        """Of all pages that a transcript can have, but those in `common` with others: full ones,
        and unfinished ones at both its ends, which hang under no page of its own or under its last
        one."""
        shared = common or Common()
        # A session of another model may hold ids that this one has not: no page of it is here.
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
        """Frees these pages on disk."""
        if self.persist:
            self._core.remove_pages(list(keys))


def tier_options(
    folder: Path | None, keep_pages: bool, disk_quota: int | str | None
) -> dict[str, Any]:
    """The engine's options for pages on disk beside the store in `folder`; none without one."""
    if not isinstance(keep_pages, bool):
        raise InvalidRequest(f"keep_pages is {keep_pages!r}, expected True or False")
    if folder is None or not keep_pages:
        return {}
    options: dict[str, Any] = {
        "page_folder": folder / "pages",
        "weights_digests": folder / "digests.json",
    }
    if disk_quota is not None:
        options["disk_quota"] = disk_quota
    return options
