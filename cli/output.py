"""Lines for the user on the standard streams, and streams that outlive their readers."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any, TextIO

from .terminal.texts import clean

_PATIENCE = 1000  # milliseconds for a reader that is behind
_AT_ONCE = 4096  # bytes that a pipe with room takes without waiting


def say(text: str, file: TextIO | None = None) -> None:
    """Prints lines without the control characters that `clean` removes.

    Args:
        text: The lines.
        file: Where to print; None: stdout.
    """
    print(clean(text), file=file, flush=True)


class _LossyFile(io.RawIOBase):
    """An open file that drops what cannot be written: nobody reads, the disk is full, or the reader
    has stalled for a second. What comes once it can be written again is written again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._stalled = descriptor, False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def fileno(self) -> int:
        """Returns the file's descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Returns whether the file is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any, /) -> int:
        """Writes the first bytes, or drops all, and returns how many it has dealt with."""
        try:
            self._stalled = not self._poll.poll(0 if self._stalled else _PATIENCE)
            if not self._stalled:
                return os.write(self._descriptor, memoryview(data)[:_AT_ONCE])
        except OSError:
            pass
        return len(data)


def drop_unread_output() -> None:
    """Makes stdout and stderr of this process drop what cannot be written, from now on.

    Streams that are not those of the process, as under a test runner, stay as they are.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        file = getattr(sys, name)
        with contextlib.suppress(io.UnsupportedOperation):
            if file.fileno() == descriptor:
                lossy = io.BufferedWriter(_LossyFile(descriptor))
                text = io.TextIOWrapper(lossy, file.encoding, file.errors, line_buffering=True)
                setattr(sys, name, text)
