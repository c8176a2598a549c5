"""A bounded cache."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The last values by key, of at most `most` in size. Any thread may use it."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._size = 0
        self._values: dict[K, V] = {}
        self._sizes: dict[K, int] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        """Returns the value, or None where it is missing or evicted."""
        return self._values.get(key)

    def put(self, key: K, value: V, size: int = 1) -> V:
        """Stores and returns `value`. Evicts the oldest ones beyond `most`."""
        with self._lock:
            self._size += size - self._sizes.get(key, 0)
            self._values[key], self._sizes[key] = value, size
            while self._size > self._most:
                oldest = next(iter(self._values))
                self._size -= self._sizes.pop(oldest)
                del self._values[oldest]
        return value
