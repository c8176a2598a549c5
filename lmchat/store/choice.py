"""Which store an engine uses: what a caller named, as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest
from lmchat.store.memory_store import MemoryStore

if TYPE_CHECKING:
    from lmchat.store.protocol import Store


def open_store(store: Any) -> tuple[Store, Path | None, bool]:
    """(the store, the folder that it and the pages live in, whether the engine closes it).

    "disk" is the user's own folder (see `lmchat.store.data_directory`), "memory" ends with the
    engine; a path is a folder of its own; a Store is used as it is. Raises InvalidRequest,
    StoreError.
    """
    if store == "memory":
        return MemoryStore(), None, True
    if store != "" and isinstance(store, str | os.PathLike):  # "" would be the current folder
        from lmchat.store.data_directory import data_dir
        from lmchat.store.sqlite.sqlite_store import SqliteStore

        chosen = SqliteStore(data_dir() if store == "disk" else Path(store))
        return chosen, chosen.home, True
    if not callable(getattr(store, "begin", None)):
        raise InvalidRequest(
            f"store is {store!r}, expected 'disk', 'memory', a folder's path or a Store"
        )
    return store, getattr(store, "home", None), False
