"""A bounded cache."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The last `most` values that were put in, by key. Any thread may use it."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Returns the value, or None where it is missing or evicted."""
        return self._values.get(key)

    def put(self, key: K, value: V) -> V:
        """Stores and returns `value`. Evicts the oldest one beyond `most`."""
        with self._lock:
            if key not in self._values and len(self._values) >= self._most:
                del self._values[next(iter(self._values))]
            self._values[key] = value
        return value
