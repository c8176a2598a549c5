"""Opens the session store and finds sessions by name or id."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest, NotFound
from turbomind.near import nearest

if TYPE_CHECKING:
    from lmchat.store.protocol import Store
    from lmchat.store.records import SessionRecord, Summary
    from lmchat.store.sqlite.sqlite_store import SqliteStore

LEAST_ID = 4  # characters of an id, at least
_SHOWN = 5  # names in a message


@contextlib.contextmanager
def opened_store() -> Iterator[tuple[SqliteStore, Path]]:
    """Opens the store of the data directory, which is created on first use.

    Yields:
        The store and the data directory.

    Raises:
        StoreError: The store cannot be opened.
    """
    from lmchat.store.data_directory import data_dir
    from lmchat.store.sqlite.sqlite_store import SqliteStore

    folder = data_dir()
    store = SqliteStore(folder)
    try:
        yield store, folder
    finally:
        store.close()


def find(store: Store, owner: str, given: str) -> Summary:
    """Returns the owner's session with that name, else the one whose id starts with `given`.

    Args:
        store: The store to search.
        owner: Owner of the session.
        given: A name, or at least LEAST_ID characters of an id.

    Raises:
        NotFound: There is none; the message has the nearest name.
        InvalidRequest: Several ids start with `given`.
    """
    sessions = store.summaries(owner)
    for session in sessions:
        if session.name == given:
            return session
    alike = [s for s in sessions if len(given) >= LEAST_ID and s.id.startswith(given.lower())]
    if len(alike) > 1:
        raise InvalidRequest(
            f"id {given!r} matches {_listed([s.name for s in alike])}, expected more characters"
        )
    if not alike:
        raise NotFound(f"there is no session {given!r}; {_hint([s.name for s in sessions], given)}")
    return alike[0]


def load(store: Store, owner: str, given: str) -> SessionRecord:
    """Loads the session that `find()` returns, with its turns.

    Raises:
        NotFound: There is none.
        InvalidRequest: Several ids match.
        StoreError: The session is damaged.
    """
    session = find(store, owner, given)
    record = store.find(owner, session.name)
    if record is None:  # another process deleted it
        raise NotFound(f"session {session.name!r} was deleted or renamed just now")
    return record


def _hint(names: list[str], given: str) -> str:
    if not names:
        return "there are no sessions yet"
    near = nearest(given, names)
    return f"did you mean {near!r}?" if near else "lmchat sessions list shows them"


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
