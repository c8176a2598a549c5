"""When the log of a database is copied into its file: once it has grown, and soon after deletions.

Not here: what a checkpoint does (`database`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from lmchat.errors import Error

LOG_BYTES = 4 << 20
"""Size of the log, in bytes, that starts a checkpoint."""

DELETED_SECONDS = 0.5
"""Time from a deletion to the work that follows it, which later deletions share."""

_LOG_STEP = 1 << 20  # growth until the next attempt, where a reader prevented its end
_SHARE = 20  # the work after deletions waits this many times as long as it took the last time
_LONGEST_WAIT = 60.0  # seconds


class Checkpointer:
    """A thread that lives while there is work for it.

    Any thread may call it.

    Args:
        checkpoint: copies the log, as far as that is possible now.
        forget: removes what deletions have left in the search index and in the log. Returns whether
            nothing is left.
    """

    def __init__(self, checkpoint: Callable[[], object], forget: Callable[[], bool]) -> None:
        self._checkpoint = checkpoint
        self._forget = forget
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._has_grown = False
        self._next_size = LOG_BYTES
        self._deletions = 0
        self._due: float | None = None  # when deletions are cleaned up, on the monotonic clock
        self._wait = DELETED_SECONDS
        self._is_ours = False  # some of what is to be cleaned up
        self._is_ending = False

    def written(self, log_bytes: int) -> None:
        """Starts a checkpoint if the log, of this size now, has grown enough."""
        with self._changed:
            if log_bytes < LOG_BYTES:
                self._next_size = LOG_BYTES
            elif log_bytes >= self._next_size:
                self._next_size = log_bytes + _LOG_STEP
                self._has_grown = True
                self._start()

    def deleted(self, *, here: bool = True) -> None:
        """Cleans up soon after a deletion.

        Args:
            here: this process has deleted, and `close()` does not leave the work to a later one.
        """
        with self._changed:
            self._deletions += 1
            self._is_ours = self._is_ours or here
            if self._due is None:
                self._due = time.monotonic() + self._wait
            self._start()

    def _start(self) -> None:
        self._changed.notify_all()
        if self._thread is not None or self._is_ending:
            return
        thread = threading.Thread(target=self._run, name="lmchat-checkpoint", daemon=True)
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # at interpreter exit, or with too many threads: the log stays
            self._thread = None

    def _run(self) -> None:
        while (work := self._next()) is not None:
            with contextlib.suppress(Error):  # the log stays; the next transaction reports it
                work()

    def _next(self) -> Callable[[], object] | None:
        """Waits for work and returns it, or None at the end."""
        with self._changed:
            while not self._is_ending:
                if self._has_grown:
                    self._has_grown = False
                    return self._checkpoint
                if self._due is None:
                    break
                left = self._due - time.monotonic()
                if left <= 0:
                    return self._clean
                self._changed.wait(left)
            self._thread = None
            return None

    def _clean(self) -> None:
        with self._changed:
            seen = self._deletions
        started, is_clean = time.monotonic(), False
        try:
            is_clean = self._forget()
        finally:
            took = time.monotonic() - started
            with self._changed:
                longer = DELETED_SECONDS if is_clean else 2 * self._wait
                self._wait = min(max(longer, _SHARE * took), _LONGEST_WAIT)
                done = is_clean and seen == self._deletions
                self._due = None if done else time.monotonic() + self._wait
                self._is_ours = self._is_ours and not done

    def close(self) -> None:
        """Ends the thread, and cleans up now what this process has deleted. Idempotent."""
        with self._changed:
            self._is_ending = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._is_ours:
            self._is_ours = False
            with contextlib.suppress(Error):
                self._forget()
