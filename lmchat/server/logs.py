"""The server's log: one line per request and per event, written by a thread of its own.

A reader of the log that stalls must not hold up replies: lines are dropped when too many wait.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_MOST = 10_000  # lines that wait


class _DroppingHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        """Hands a line to the thread, or drops it."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def logged(level: str, file: TextIO) -> Iterator[None]:
    """Writes the log to `file` until the context ends.

    Args:
        level: one of LEVELS.
        file: the file, such as stderr.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST)
    writer = logging.StreamHandler(file)
    writer.setFormatter(logging.Formatter(_FORMAT))
    handler = _DroppingHandler(lines)
    listener = QueueListener(lines, writer)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.removeHandler(handler)
        root.setLevel(before)
