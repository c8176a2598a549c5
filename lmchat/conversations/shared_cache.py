"""A cache that several owners share: bounded as a whole, and no owner can evict another's share."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass
class _Owned(Generic[V]):
    """The values of one owner, least recently used first, with the time of their last use."""

    values: OrderedDict[V, float] = field(default_factory=OrderedDict)
    size: int = 0


class SharedCache(Generic[V]):
    """Values by owner, within bounds of number, size and age. The caller synchronizes calls.

    Beyond a bound, the owner with the largest share loses its least recently used value. So an
    owner below an equal share loses nothing to others.

    Args:
        most: number of values.
        size: sum of their sizes.
        seconds: time since its last use after which a value is dropped.
        dropped: called with a value that is dropped.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        most: int,
        size: int,
        seconds: float,
        dropped: Callable[[V], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._largest, self._seconds = most, size, seconds
        self._dropped, self._clock = dropped, clock
        self._owners: dict[str, _Owned[V]] = {}
        self._sizes: dict[V, tuple[str, int]] = {}
        self._oldest: OrderedDict[V, float] = OrderedDict()  # of all owners
        self._shares: list[tuple[float, str]] = []  # a heap; entries may be outdated
        self._size = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size(self) -> int:
        """Sum of the sizes."""
        return self._size

    def of(self, owner: str) -> Iterable[V]:
        """Returns the owner's values, least recently used first."""
        owned = self._owners.get(owner)
        return owned.values if owned else ()

    def put(self, owner: str, value: V, size: int) -> None:
        """Adds a value or changes its size, as the most recently used one. Then drops values that
        are too old or beyond the bounds, perhaps this one."""
        self._take(value)
        owned = self._owners.setdefault(owner, _Owned())
        owned.values[value] = self._oldest[value] = self._clock()
        owned.size += size
        self._size += size
        self._sizes[value] = (owner, size)
        heapq.heappush(self._shares, (-self._share(owned), owner))
        self.expire()
        while len(self) > self._most or self._size > self._largest:
            self._drop(next(iter(self._owners[self._largest_owner()].values)))

    def remove(self, value: V) -> bool:
        """Removes a value without dropping it. Returns whether it was there."""
        return self._take(value)

    def expire(self) -> None:
        """Drops the values that have not been used for too long."""
        until = self._clock() - self._seconds
        while self._oldest and next(iter(self._oldest.values())) < until:
            self._drop(next(iter(self._oldest)))

    def clear(self) -> None:
        """Drops all values."""
        while self._oldest:
            self._drop(next(iter(self._oldest)))

    def _drop(self, value: V) -> None:
        self._take(value)
        self._dropped(value)

    def _take(self, value: V) -> bool:
        found = self._sizes.pop(value, None)
        if found is None:
            return False
        owner, size = found
        owned = self._owners[owner]
        del owned.values[value], self._oldest[value]
        owned.size -= size
        self._size -= size
        if owned.values:
            heapq.heappush(self._shares, (-self._share(owned), owner))
        else:
            del self._owners[owner]
        if len(self._shares) > 4 * len(self._owners) + 64:
            self._shares = [(-self._share(one), name) for name, one in self._owners.items()]
            heapq.heapify(self._shares)
        return True

    def _share(self, owned: _Owned[V]) -> float:
        return max(len(owned.values) / self._most, owned.size / self._largest)

    def _largest_owner(self) -> str:
        while True:
            share, owner = self._shares[0]
            owned = self._owners.get(owner)
            if owned is not None and -share == self._share(owned):
                return owner
            heapq.heappop(self._shares)
