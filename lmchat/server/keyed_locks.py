"""Locks by key, such as the id of a session."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator


class KeyedLocks:
    """One lock for each key, which exists while a caller has it. Any thread."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[Hashable, _Lock] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def holding(self, key: Hashable) -> Iterator[None]:
        """Waits for the lock of a key and holds it in the body."""
        with self._guard:
            found = self._locks.get(key)
            if found is None:
                found = self._locks[key] = _Lock()
        with found.lock:
            yield


class _Lock:
    """A lock that can be weakly referenced."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
