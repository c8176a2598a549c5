"""The terminal: lines that stay, and below them a live part that is painted again in place."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .layout import wrap

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
PASTE_OFF = "\x1b[?2004l"  # prompt_toolkit switches it on
CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"
FALLBACK = os.terminal_size((80, 24))
ENDLESS = 1_000_000  # columns of a file: who reads it wraps its lines


class Screen:
    """Writes to a terminal.

    Between two paints the cursor stands, hidden, on the first cell of the live part: a terminal
    that wraps its lines anew when it is resized takes the cursor along, so the next paint begins at
    the right place whatever became of the lines below. While the live part is painted the terminal
    does not wrap, so that one line is one row even where it disagrees about a character's width.
    """

    def __init__(self, file: TextIO | None = None, *, plain: bool = False) -> None:
        self.file = sys.stdout if file is None else file
        self._console = Console(file=self.file, highlight=False, soft_wrap=True)
        self.plain = plain or not self._console.is_terminal or self._console.is_dumb_terminal
        self._settings = _settings()
        self.live = False  # whether there is a live part, maybe empty

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows, asked anew each time."""
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(self.file.fileno())
            if size.columns and size.lines:
                return size
        return FALLBACK

    @property
    def width(self) -> int:
        """Columns; without end where no terminal is."""
        return self.size.columns if self._console.is_terminal else ENDLESS

    def write(self, text: str) -> None:
        """Writes as it is."""
        self.file.write(text)
        self.file.flush()

    def print(self, *lines: Text) -> None:
        """Puts lines above the live part, as they are: the terminal wraps those too long."""
        clear = "\r" + CLEAR_BELOW if self.live else ""
        self.write(clear + "".join(self._encode(line) + "\n" for line in lines))

    def note(self, text: str, style: str = "dim") -> None:
        """Prints a message, wrapped at words."""
        self.print(*wrap(Text(text, style=style), self.width))

    def facts(self, parts: Sequence[str]) -> None:
        """Prints short things beside each other, as many in a line as fit."""
        lines = [""]
        for part in parts:
            longer = f"{lines[-1]} · {part}" if lines[-1] else part
            if cell_len(longer) <= self.width or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(part)
        for line in lines:
            self.note(line)

    def paint(self, live: Sequence[Text], above: Sequence[Text] = ()) -> None:
        """Replaces the live part, by the last lines where not all fit, and puts lines `above`."""
        done = "".join(self._encode(line) + "\n" for line in above)
        start = f"\r{CLEAR_BELOW}{done}" if done else ""
        shown = live[-max(1, self.size.lines - 1) :]
        if not shown:
            self.write(start or "\r" + CLEAR_BELOW)
            return
        *head, last = [self._encode(line) for line in shown]
        text = "".join(f"\r{CLEAR_LINE}{line}\n" for line in head)
        up = f"\x1b[{len(head)}A" if head else ""
        self.write(f"{start}{NO_WRAP}{text}\r{CLEAR_BELOW}{last}\r{up}{WRAP}")

    def _encode(self, line: Text) -> str:
        """The line with its escape sequences, as far as the terminal has colours."""
        line.no_wrap = True
        line.end = ""
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        return capture.get()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal is ours. At the end it is as it was, wherever the end came."""
        with self.quiet_keys():
            try:
                yield
            finally:
                if self._console.is_terminal and not self._console.is_dumb_terminal:
                    with contextlib.suppress(OSError):  # the terminal is gone
                        self.write(PASTE_OFF + WRAP + SHOW_CURSOR)

    @contextlib.contextmanager
    def quiet_keys(self, quiet: bool = True) -> Iterator[None]:
        """What is typed is not shown, and the next prompt gets it key by key; signals work."""
        self._set_keys(quiet)
        try:
            yield
        finally:
            self._set_keys(not quiet)

    def _set_keys(self, quiet: bool) -> None:
        if self._settings is None:
            return
        settings = copy.deepcopy(self._settings)
        if quiet:
            settings[0] &= ~termios.ICRNL
            settings[3] &= ~(termios.ECHO | termios.ICANON)
        with contextlib.suppress(termios.error, OSError):  # the terminal is gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)

    @contextlib.contextmanager
    def live_part(self) -> Iterator[None]:
        """Below the printed lines there is a live part, erased at the end."""
        self._take()
        try:
            yield
        finally:
            self._give_back()

    def suspend(self) -> None:
        """Ctrl-Z: the shell gets the terminal as it was; back here it is taken again."""
        self._give_back()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with self.quiet_keys(False):
            os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._take()

    def _take(self) -> None:
        if not self.plain:
            self.live = True
            self.write(HIDE_CURSOR)

    def _give_back(self) -> None:
        if self.live:
            self.live = False
            self.write("\r" + CLEAR_BELOW + WRAP + SHOW_CURSOR)


def _settings() -> list[Any] | None:
    """Those of the terminal that is typed in; None where there is none."""
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        return None
