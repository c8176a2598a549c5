"""Replies that end when no client has read them for some time.

A client whose connection broke can come back within the `linger` seconds of its reply. A client
that does not come back leaves no reply running.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from lmchat.generation.generation import Generation


@dataclass
class _Watched:
    """A reply, the number of its readers, and the timer that ends it."""

    linger: float
    readers: int = 0
    timer: asyncio.TimerHandle | None = None


class Readers:
    """The readers of lingering replies. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[Generation, _Watched] = weakref.WeakKeyDictionary()

    def watch(self, generation: Generation, linger: float) -> None:
        """Ends a generation once it has had no reader for `linger` seconds."""
        found = self._watched[generation] = _Watched(linger)
        self._start(found, generation)

    @contextlib.contextmanager
    def reading(self, generation: Generation) -> Iterator[None]:
        """Counts a reader while the block runs."""
        found = self._watched.get(generation)
        if found is None:
            yield
            return
        found.readers += 1
        if found.timer is not None:
            found.timer.cancel()
            found.timer = None
        try:
            yield
        finally:
            found.readers -= 1
            if not found.readers and not generation.done:
                self._start(found, generation)

    def _start(self, found: _Watched, generation: Generation) -> None:
        loop = asyncio.get_running_loop()
        found.timer = loop.call_later(found.linger, generation.cancel)
