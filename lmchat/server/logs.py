"""The server's log: one line per request and per event, written by a thread of its own.

A reader of the log that stalls must not hold up replies: lines are dropped when too many wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

from turbomind.shown import printable

LEVELS = ("debug", "info", "warning", "error")

NAME = "LMCHAT_LOG_NAME"
"""Variable of the environment with a name of this process, which each line has: its replica."""

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_MOST = 10_000  # lines that wait


class LineFormatter(logging.Formatter):
    """Lines with time, level and the name of the process. No control character gets through."""

    def __init__(self) -> None:
        name = os.environ.get(NAME, "").replace("%", "%%")
        super().__init__(
            _FORMAT.replace("%(message)s", f"{name}: %(message)s") if name else _FORMAT
        )

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of a record."""
        lines = super().format(record).expandtabs().split("\n")
        return "\n".join(printable(line) for line in lines)


class _DroppingHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        """Hands a line to the thread, or drops it."""
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def written(level: str) -> Iterator[None]:
    """Writes the log of `lmchat` to stderr until the context ends, without a thread: for a process
    that forks.

    Args:
        level: one of LEVELS.
    """
    log, handler = logging.getLogger("lmchat"), logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(level.upper())
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextlib.contextmanager
def logged(level: str, file: TextIO) -> Iterator[None]:
    """Writes the log to `file` until the context ends.

    Args:
        level: one of LEVELS.
        file: the file, such as stderr.
    """
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST)
    writer = logging.StreamHandler(file)
    writer.setFormatter(LineFormatter())
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
