"""A store that fails when it is told to."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lmchat.errors import StoreError

CALLS = (
    "find", "add", "add_numbered", "refresh", "rename", "change", "remove", "begin", "journal",
    "sync", "finish", "release", "unfinished", "recover",
)  # fmt: skip


class FaultyStore:
    """`store`, but the calls of `failing` (a method's name and the first and last of its calls,
    from 1, that fail) raise StoreError before they do anything."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.data_dir = getattr(store, "data_dir", None)
        self.failing: tuple[str, int, int] | None = None
        self.calls: Counter[str] = Counter()

    def fail(self, name: str, first: int = 1, last: int | None = None) -> None:
        """From now on, counted anew."""
        self.calls.clear()
        self.failing = (name, first, first if last is None else last)

    def heal(self) -> None:
        """No call fails any more."""
        self.failing = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in CALLS:
            return method

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if self.failing is not None:
                failing, first, last = self.failing
                if name == failing and first <= self.calls[name] <= last:
                    raise StoreError(f"{name} fails, as it was told to")
            return method(*args, **options)

        return call
