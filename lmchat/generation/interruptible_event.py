"""Waiting for another thread in a way that an interrupt cannot break."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class InterruptibleEvent:
    """Wakes those who wait for something that is now so.

    Neither method takes a lock, as a `threading.Condition` does: Ctrl-C between two steps of the
    waiting thread leaves nothing held, and a finalizer may ring while its thread waits.
    """

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Until `ready()`, which is asked once more after each `ring()`."""
        while not ready():
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if ready():  # since before anybody could ring for it; the next ring takes it out
                return
            waiter.acquire()

    def set(self) -> None:
        """After what they wait for was set. Any number of threads."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread rings too
                return
            waiter.release()
