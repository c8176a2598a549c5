"""Opens the store that a caller names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.store.memory_store import MemoryStore
from turbomind.params import wrong

if TYPE_CHECKING:
    from lmchat.store.protocol import Store


def open_store(store: Any) -> tuple[Store, Path | None, bool]:
    """Opens a store.

    Args:
        store: "disk" (the user's data directory), "memory" (ends with the engine), the path of a
            data directory, or a `Store`.

    Returns:
        The store, its data directory (None in memory), and whether the engine closes the store.

    Raises:
        InvalidRequest: `store` is none of these.
        StoreError: the store cannot be opened.
    """
    if store == "memory":
        return MemoryStore(), None, True
    if store != "" and isinstance(store, str | os.PathLike):  # "" would name the current folder
        from lmchat.store.data_directory import data_dir
        from lmchat.store.sqlite.sqlite_store import SqliteStore
        from lmchat.store.temporary import remove_leftovers

        chosen = SqliteStore(data_dir() if store == "disk" else Path(store))
        remove_leftovers(chosen.data_dir)
        return chosen, chosen.data_dir, True
    if not callable(getattr(store, "begin", None)):
        raise wrong("store", store, "'disk', 'memory', a folder's path or a Store")
    return store, getattr(store, "data_dir", None), False
