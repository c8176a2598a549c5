"""A bounded memory."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The last `most` values that were put in, by key. Safe to use from many threads."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """The value, None when it is not (or no longer) known."""
        return self._values.get(key)

    def put(self, key: K, value: V) -> V:
        """Keeps `value`, which is returned; the oldest one goes when there are too many."""
        with self._lock:
            if key not in self._values and len(self._values) >= self._most:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value
