"""Escape sequences, on a terminal that takes them, and the line while a model loads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from ..errors import note
from .texts import clean

CLEAR_LINE = "\r\x1b[K"
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_NONE = ("", "dumb", "unknown")  # values of $TERM


def takes_escapes(file: TextIO) -> bool:
    """Returns whether `file` is a terminal that takes escape sequences: $TERM says which do not."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in _NONE


def dim(text: str) -> str:
    """Returns a text for stderr, dimmed where that is a terminal that can."""
    return f"{_DIM}{text}{_NORMAL}" if takes_escapes(sys.stderr) else text


@contextlib.contextmanager
def loading(name: str) -> Iterator[None]:
    """Shows on a terminal that a model is loaded; warnings of the block have lines of their own.

    Args:
        name: Name of the model.
    """
    if not sys.stderr.isatty():
        yield
        return
    line = _Line(f"loading {clean(name)} ...")
    log = logging.getLogger()
    log.addHandler(line)
    try:
        line.show()
        yield
    finally:
        log.removeHandler(line)
        line.clear()


class _Line(logging.Handler):
    """A line that is removed at the end, where the terminal can, and prints what is logged."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.WARNING)
        self._text = text
        self._passes = takes_escapes(sys.stderr)

    def show(self) -> None:
        end = "" if self._passes else "\n"
        print(self._text, end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._passes:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        self.clear()
        note(record.getMessage())
        if self._passes:
            self.show()
