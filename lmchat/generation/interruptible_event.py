"""An event that stays consistent when an interrupt ends a wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class InterruptibleEvent:
    """Wakes all threads that wait for a condition.

    Unlike `threading.Condition`, neither method holds a lock. Ctrl-C between two steps of a waiting
    thread leaves nothing locked, and a finalizer may call `set()` while its own thread waits.
    """

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` returns True. Evaluates it again after each `set()`."""
        while not ready():
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            # It became ready before the append was visible; the next `set()` removes the waiter.
            if ready():
                return
            waiter.acquire()

    def set(self) -> None:
        """Wakes all waiters, after their condition was made true. Any number of threads may call
        it."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread calls `set()` too
                return
            waiter.release()
