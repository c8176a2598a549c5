"""The worker thread of an engine, for work that may wait for the store of sessions.

The reader threads never wait for the store, except to journal tokens before they are shown.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lmchat.generation.interruptible_event import result_of

Result = TypeVar("Result")


class Worker:
    """A thread that does one piece of work after the other until `close()`.

    Work that Ctrl-C must not interrupt goes through `call()`: signals arrive on the main thread
    only, so it does the work of all other threads on these themselves.

    Args:
        tick: called on the thread every `seconds`. It must not raise.
        seconds: time between two ticks; None: no ticks.
    """

    def __init__(self, tick: Callable[[], object] = lambda: None, seconds: float | None = None):
        self._tick = tick
        self._seconds = seconds
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="lmchat-worker", daemon=True)
        self._thread.start()

    def later(self, work: Callable[[], object]) -> None:
        """Posts `work`, in order. Errors are logged. Never waits and takes no Python lock, so any
        thread and finalizer may call it. Once the thread has ended, the caller does the work."""
        self._work.put(work)
        if self._ended:
            self._do_rest()

    def poster(self, work: Callable[[], object]) -> Callable[[object], None]:
        """Returns a callback of a weak reference that posts `work`. It runs no Python code, so
        neither Ctrl-C nor a lock that the thread holds can disturb it."""
        return functools.partial(self._work.put, work)

    def call(self, work: Callable[[], Result]) -> Result:
        """Does `work` and returns its result, or raises its error. Ctrl-C interrupts the wait for
        it, not the work itself."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        return result_of(work, self.later)

    def close(self) -> None:
        """Does all work that was posted before, then ends the thread. Idempotent."""
        self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        seconds = self._seconds
        next_tick = time.monotonic() + (seconds or 0.0)
        while True:
            if seconds is not None and time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + seconds
            try:
                timeout = None if seconds is None else max(0.0, next_tick - time.monotonic())
                work = self._work.get(timeout=timeout)
            except queue.Empty:
                continue
            if work is None:
                break
            _do(work)
            del work  # it may hold a session
        self._ended = True
        self._do_rest()

    def _do_rest(self) -> None:
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                _do(work)


def _do(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        logging.getLogger(__name__).error("background work failed", exc_info=error)
