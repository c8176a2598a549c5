"""Prints lines on the terminal, and repaints a live part after them in place.

`rich.live.Live` moves the cursor up by the rows that it painted before; after a resize that number
is wrong, and stale rows stay on the screen. See `Screen` for the way used here.
"""

from __future__ import annotations

import base64
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

from lmchat.errors import InvalidRequest

from .escapes import takes_escapes
from .layout import clean_text, wrap
from .texts import clean

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"  # prompt_toolkit switches both
CLEAR_LINE, CLEAR_REST = "\x1b[K", "\x1b[J"
FALLBACK = os.terminal_size((80, 24))
ENDLESS = 1_000_000  # columns outside a terminal: lines are not wrapped


class Screen:
    """Writes to a terminal or a file.

    Between two paints the hidden cursor stands on the first cell of the live part. A terminal that
    reflows its lines after a resize moves the cursor along, so that the next paint starts at the
    right place. Wrapping is off during a paint, so that one line takes one row even where the
    terminal measures a character's width differently.

    Args:
        file: The output; None: stdout.
        plain: Write plain text, also to a terminal.
    """

    def __init__(self, file: TextIO | None = None, *, plain: bool = False) -> None:
        self.file = sys.stdout if file is None else file
        self._console = Console(file=self.file, highlight=False, soft_wrap=True)
        self.plain = plain or not takes_escapes(self.file)
        self._settings = _settings()
        self.live = False  # whether there is a live part, possibly empty

    @property
    def size(self) -> os.terminal_size:
        """Columns and rows of the terminal, queried each time."""
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(self.file.fileno())
            if size.columns and size.lines:
                return size
        return FALLBACK

    @property
    def width(self) -> int:
        """Columns of the terminal; ENDLESS outside one."""
        return self.size.columns if self.file.isatty() else ENDLESS

    def write(self, text: str) -> None:
        """Writes text without changes."""
        self.file.write(text)
        self.file.flush()

    def copy(self, text: str) -> None:
        """Asks the terminal to put a text on the clipboard (OSC 52 of xterm).

        Raises:
            InvalidRequest: The output is not a terminal that takes escape sequences.
        """
        if not takes_escapes(self.file):
            raise InvalidRequest(
                "nothing is copied: the output is not a terminal that takes escape sequences"
            )
        data = base64.b64encode(text.encode(errors="replace")).decode()
        self.write(f"\x1b]52;c;{data}\x07")

    def print(self, *lines: Text) -> None:
        """Prints lines before the live part; the terminal wraps long ones."""
        clear = "\r" + CLEAR_REST if self.live else ""
        self.write(clear + "".join(self._encode(line) + "\n" for line in lines))

    def note(self, text: str, style: str = "dim") -> None:
        """Prints a message, wrapped at words."""
        self.print(*wrap(Text(clean(text), style=style), self.width))

    def facts(self, parts: Sequence[str]) -> None:
        """Prints short texts on one line, or on as many as they need."""
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
        """Prints the lines `above`, then replaces the live part; of a long one the end is shown."""
        done = "".join(self._encode(line) + "\n" for line in above)
        start = f"\r{CLEAR_REST}{done}" if done else ""
        shown = live[-max(1, self.size.lines - 1) :]
        if not shown:
            self.write(start or "\r" + CLEAR_REST)
            return
        *head, last = [self._encode(line) for line in shown]
        text = "".join(f"\r{CLEAR_LINE}{line}\n" for line in head)
        up = f"\x1b[{len(head)}A" if head else ""
        self.write(f"{start}{NO_WRAP}{text}\r{CLEAR_REST}{last}\r{up}{WRAP}")

    def _encode(self, line: Text) -> str:
        """Returns the line with the escape sequences that the terminal supports.

        All lines pass here: a control character of a chat, a name or a path ends here.
        """
        line = clean_text(line)
        line.no_wrap = True
        line.end = ""
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        return capture.get()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A context that restores the terminal's settings at its end, also after an error."""
        with self.quiet_keys():
            try:
                yield
            finally:
                if takes_escapes(self.file):
                    with contextlib.suppress(OSError):  # the terminal was closed
                        self.write(PASTE_OFF + WRAP + SHOW_CURSOR)

    @contextlib.contextmanager
    def quiet_keys(self, quiet: bool = True) -> Iterator[None]:
        """A context in which typed keys are not echoed and stay for the next prompt."""
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
            settings[3] |= termios.NOFLSH  # Ctrl-C keeps what was typed
        with contextlib.suppress(termios.error, OSError):  # the terminal was closed
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)

    @contextlib.contextmanager
    def live_part(self) -> Iterator[None]:
        """A context with a live part after the printed lines, which is erased at the end."""
        self._hide_cursor()
        try:
            yield
        finally:
            self._erase_live_part()

    def bracket_pastes(self, on: bool = True) -> None:
        """Makes the terminal mark pastes, so that a later prompt takes each as one text."""
        if takes_escapes(self.file):
            self.write(PASTE_ON if on else PASTE_OFF)

    def suspend(self) -> None:
        """Suspends the process (Ctrl-Z) with restored settings, and continues after `fg`."""
        self._erase_live_part()
        self.bracket_pastes(False)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        with self.quiet_keys(False):
            os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self.bracket_pastes()
        self._hide_cursor()

    def _hide_cursor(self) -> None:
        if not self.plain:
            self.live = True
            self.write(HIDE_CURSOR)

    def _erase_live_part(self) -> None:
        if self.live:
            self.live = False
            self.write("\r" + CLEAR_REST + WRAP + SHOW_CURSOR)


def _settings() -> list[Any] | None:
    """Returns the settings of the terminal of stdin; None without one."""
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):
        return None
