"""A program in a pseudo-terminal, and the screen that it draws."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyte

DEADLINE = 120.0
"""Seconds that a screen is waited for."""


class _Screen(pyte.Screen):
    """Shows faint text as bright black, since pyte has no faint attribute."""

    def __init__(self, columns: int, rows: int, answer: Callable[[str], None]) -> None:
        super().__init__(columns, rows)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        """Passes the terminal's answer to a query on to the program."""
        self._answer(data)

    def select_graphic_rendition(self, *attrs: int, **flags: Any) -> None:
        """Replaces SGR 2 (faint) by SGR 90 (bright black)."""
        super().select_graphic_rendition(*(90 if a == 2 else a for a in attrs), **flags)


class PtyScreen:
    """Runs a command in a pseudo-terminal of fixed size. A context manager that ends the command.

    Args:
        command: The program and its arguments.
        columns: Width of the terminal, in cells.
        rows: Height of the terminal, in cells.
        env: The whole environment of the program.
    """

    def __init__(
        self, command: Sequence[str], *, columns: int, rows: int, env: Mapping[str, str]
    ) -> None:
        self.columns, self.rows = columns, rows
        self._screen = _Screen(columns, rows, self.write)
        self._stream = pyte.ByteStream(self._screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execvpe(command[0], list(command), dict(env))
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> PtyScreen:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def write(self, text: str) -> None:
        """Sends keys to the program."""
        os.write(self._fd, text.encode())

    @property
    def lines(self) -> list[str]:
        """Text of each row, without trailing spaces."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """Text of the screen, without empty rows at the end."""
        return "\n".join(self.lines).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column of the cursor, from 0."""
        return self._screen.cursor.y, self._screen.cursor.x

    def styles(self, row: int) -> list[str]:
        """Returns the style of each cell of a row: "", "bold", "dim" or a colour's name."""
        cells = self._screen.buffer[row]
        return [_style(cells[column]) for column in range(self.columns)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until `condition` holds.

        Raises:
            TimeoutError: It does not hold after DEADLINE; the message shows the screen.
        """
        end = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"waited in vain for {what}; the screen:\n{self.text}")
            self._read(0.05)

    def settle(self, seconds: float = 0.15) -> None:
        """Reads until the program has written nothing for `seconds`."""
        while self._read(seconds):
            pass

    def _read(self, timeout: float) -> bool:
        if not select.select([self._fd], [], [], timeout)[0]:
            return False
        self._stream.feed(os.read(self._fd, 65536))
        return True


def _style(cell: Any) -> str:
    if cell.fg == "brightblack":
        return "dim"
    return "bold" if cell.bold else ("" if cell.fg == "default" else str(cell.fg))
