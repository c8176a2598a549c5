"""What sessions ask of the tiers below the engine's memory: the one file that knows how.

An engine without them has nothing below: everything is down at once and nothing is ever loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmchat.errors import EngineClosed, Error, InvalidRequest
from turbomind import Engine, Handle
from turbomind.engine import OPTIONS


class PagesBelow:
    """The tiers of one engine. `persist`: the pages of sessions are copied down. Any thread."""

    def __init__(self, core: Engine, persist: bool) -> None:
        self._core: Any = core
        self.persist = persist

    @property
    def fingerprint(self) -> str:
        """What keys and values depend on, as the engine says; empty where it does not."""
        return str(getattr(self._core, "fingerprint", ""))

    def open(self, salt: str, keep_value: float) -> Handle:
        """A handle whose pages go down as they are sealed."""
        options = {"persist": True} if self.persist else {}
        handle: Handle = self._core.open(salt, keep_value, **options)
        return handle

    def save(self, handle: Any) -> None:
        """Posts that the handle's unfinished page goes down too."""
        if self.persist:
            with contextlib.suppress(Error):  # the engine has lost it, or is closed
                handle.save()

    def close(self, handle: Any) -> None:
        """Closes the handle; what it holds goes down."""
        if self.persist:
            handle.close(save=True)
        else:
            handle.close()

    def flush(self, seconds: float) -> bool:
        """Waits until what was posted is down; whether it is."""
        try:
            return not self.persist or bool(self._core.flush_pages(seconds))
        except EngineClosed:  # which has written all
            return True

    def refresh(self) -> None:
        """Another process has written pages."""
        if self.persist:
            self._core.refresh_pages()

    def keys(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Of the pages of a transcript."""
        return list(self._core.page_keys(token_ids, salt)) if self.persist else []

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
    if folder is None or not keep_pages or "page_folder" not in OPTIONS:
        return {}
    options: dict[str, Any] = {
        "page_folder": folder / "pages",
        "weights_digests": folder / "digests.json",
    }
    if disk_quota is not None:
        options["disk_quota"] = disk_quota
    return options
