"""The store of the person's sessions, and which of them a name on the command line means."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmchat.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from lmchat.store.base import SessionRecord, Store, Summary
    from lmchat.store.sqlite.sqlite_store import SqliteStore

OWNER = "local"
LEAST_ID = 4  # characters of an id that stand for all of it
_SHOWN = 5  # names in a message


@contextlib.contextmanager
def opened_store() -> Iterator[tuple[SqliteStore, Path]]:
    """The store and its home, which is made on first use. StoreError where it cannot be used."""
    from lmchat.store.data_directory import data_dir
    from lmchat.store.sqlite.sqlite_store import SqliteStore

    folder = data_dir()
    store = SqliteStore(folder)
    try:
        yield store, folder
    finally:
        store.close()


def find(store: Store, owner: str, given: str) -> Summary:
    """The owner's session with that name, or else the one whose id begins so.

    Raises NotFound with the nearest names, InvalidRequest where several ids begin so.
    """
    sessions = store.summaries(owner)
    for session in sessions:
        if session.name == given:
            return session
    alike = [s for s in sessions if len(given) >= LEAST_ID and s.id.startswith(given.lower())]
    if len(alike) > 1:
        raise InvalidRequest(
            f"{given!r} begins the ids of {_listed([s.name for s in alike])}, expected more of one"
        )
    if not alike:
        raise NotFound(f"there is no session {given!r}; {_hint([s.name for s in sessions], given)}")
    return alike[0]


def load(store: Store, owner: str, given: str) -> SessionRecord:
    """As `find()`, with its turns. Raises StoreError for a damaged one too."""
    session = find(store, owner, given)
    record = store.find(owner, session.name)
    if record is None:  # another process was faster
        raise NotFound(f"session {session.name!r} was deleted or renamed just now")
    return record


def _hint(names: list[str], given: str) -> str:
    if not names:
        return "there are none yet"
    near = difflib.get_close_matches(given, names, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else "lmchat sessions list shows them"


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
