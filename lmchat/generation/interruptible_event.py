"""Waits that an interrupt may end: for a condition, and for the work of another thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


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


def result_of(work: Callable[[], Result], post: Callable[[Callable[[], None]], object]) -> Result:
    """Posts work to another thread, waits, and returns its result or raises its error. Ctrl-C
    interrupts the wait, not the work itself."""
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    post(run)
    done.acquire()
    if errors:
        raise errors[0]
    return results[0]
