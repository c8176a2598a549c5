"""How long a store has been in use: an age that no clock changes.

Ages of what is deleted when it was not used for long count this time, so nothing is deleted because
the clock jumped, or because the machine was off for a month.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from lmchat.store.protocol import Store

MARK_SECONDS = 6 * 3600.0
"""Time in use between two marks: an age is counted up to this much too long."""

_NOTE = "use"  # key of the note in the store
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class UseTime:
    """The time in use of a store, counted by the processes that call `mark()` now and then.

    The store has a note of it, with marks: the time in use, and the last use of any session then.
    Two processes that count at the same time count once.

    Args:
        store: the store.
        clock: returns seconds that only rise while the machine runs.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._last = clock()
        self._lock = threading.Lock()

    def mark(self) -> None:
        """Counts the time since the last call, or since the start of this process."""
        with self._lock:
            now, noted = self._clock(), self._read()
            passed = max(0.0, now - self._last)
            if noted["boot"] == _boot() and now - noted["at"] >= 0:
                passed = min(passed, now - noted["at"])  # another process has counted until then
            self._last = now
            seconds, marks = noted["seconds"] + passed, noted["marks"]
            newest = self._store.summaries(limit=1)
            if newest and (not marks or seconds - marks[-1][0] >= MARK_SECONDS):
                marks.append([seconds, newest[0].last_used.isoformat()])
            note = {"seconds": seconds, "at": now, "boot": _boot(), "marks": marks}
            self._store.note(_NOTE, note)

    def unused_since(self, seconds: float) -> datetime | None:
        """Returns a time for which holds: a session whose last use is not later was not used for
        this many seconds in which the store was in use. None: no session is known to be so old.

        Older marks are forgotten.
        """
        with self._lock:
            noted = self._read()
            old = [mark for mark in noted["marks"] if noted["seconds"] - mark[0] >= seconds]
            if not old:
                return None
            noted["marks"] = [old[-1], *noted["marks"][len(old) :]]
            self._store.note(_NOTE, noted)
            return datetime.fromisoformat(old[-1][1])

    def _read(self) -> dict[str, Any]:
        """Returns the note, a new one if it is missing or damaged."""
        noted = self._store.noted(_NOTE)
        with contextlib.suppress(TypeError, KeyError, ValueError):
            for seconds, moment in noted["marks"]:
                float(seconds), datetime.fromisoformat(moment)
            return {
                "seconds": float(noted["seconds"]),
                "at": float(noted["at"]),
                "boot": str(noted["boot"]),
                "marks": list(noted["marks"]),
            }
        return {"seconds": 0.0, "at": 0.0, "boot": "", "marks": []}


def _boot() -> str:
    """Returns what names this run of the machine: clocks of different ones cannot be compared."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
