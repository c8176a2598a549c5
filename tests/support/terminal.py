"""Runs a program in a pseudo-terminal: types keys and reads the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import pyte

DEADLINE = 60.0  # seconds until a wait for the screen fails
KEYS = {
    "enter": "\r",
    "alt-enter": "\x1b\r",
    "tab": "\t",
    "up": "\x1b[A",
    "backspace": "\x7f",
    "ctrl-c": "\x03",
    "ctrl-d": "\x04",
    "ctrl-e": "\x05",
    "ctrl-r": "\x12",
    "ctrl-x": "\x18",
    "ctrl-z": "\x1a",
}


class _Screen(pyte.HistoryScreen):
    """Drops joiners and variation selectors, which would make pyte drop the rest of the line."""

    def __init__(self, columns: int, rows: int, answer: Callable[[bytes], None]) -> None:
        super().__init__(columns, rows, history=10_000, ratio=0.5)
        self._answer = answer

    def draw(self, data: str) -> None:
        super().draw(data.replace("\u200d", "").replace("\ufe0f", ""))

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())


class Terminal:
    """Runs a program in a pseudo-terminal. A context manager that ends the program.

    Args:
        command: The program and its arguments.
        columns: Width of the terminal, in cells.
        rows: Height of the terminal, in cells.
        env: Environment variables in addition to the current ones.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            if name not in (env or {}):
                environment.pop(name, None)
        # The slave stays open, so that its settings can be read after the program has ended.
        self._fd, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.raw = b""
        self._screen = _Screen(columns, rows, self._write)
        self._stream = pyte.ByteStream(self._screen)
        self._code: int | None = None
        self.settings_before = termios.tcgetattr(self._slave)
        self.pid = self._start(list(command), environment)

    def _start(self, command: list[str], environment: Mapping[str, str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:  # the child makes only system calls
            os.setsid()
            fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(self._slave, fd)
            os.closerange(3, 256)
            os.execvpe(command[0], command, environment)
        finally:
            os._exit(127)

    # --- input --------------------------------------------------------------------------------

    def type(self, text: str) -> None:
        """Types the text, key by key."""
        self._write(text.encode())

    def key(self, *names: str) -> None:
        """Presses the keys of those names."""
        for name in names:
            self._write(KEYS[name].encode())

    def paste(self, text: str) -> None:
        """Pastes as a terminal with bracketed paste does."""
        self._write(b"\x1b[200~" + text.encode() + b"\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        """Resizes the window."""
        self._drain(0.0)
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def hang_up(self) -> None:
        """Closes the window."""
        os.close(self._slave)
        os.close(self._fd)
        self._slave = self._fd = -1

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, data)

    # --- output --------------------------------------------------------------------------------

    @property
    def display(self) -> list[str]:
        """Rows of the screen, without trailing spaces."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """Text of the screen, without empty rows at the end."""
        return "\n".join(self.display).rstrip("\n")

    @property
    def everything(self) -> str:
        """Text of the scrollback and of the screen."""
        columns = self._screen.columns
        above = [_row(line, columns) for line in self._screen.history.top]
        return "\n".join([*above, *self.display]).rstrip("\n")

    @property
    def cursor(self) -> tuple[int, int]:
        """Column and row of the cursor, from 0."""
        return self._screen.cursor.x, self._screen.cursor.y

    @property
    def cursor_hidden(self) -> bool:
        """Returns whether the cursor is hidden."""
        return bool(self._screen.cursor.hidden)

    @property
    def wraps(self) -> bool:
        """Returns whether long lines are wrapped."""
        return pyte.modes.DECAWM in self._screen.mode

    @property
    def settings(self) -> list[object]:
        """The terminal's settings, to compare with `settings_before`."""
        return termios.tcgetattr(self._slave)

    def style(self, text: str) -> str:
        """Returns the style of the first place with `text`, such as "bold" or "red"."""
        for y, line in enumerate(self._screen.display):
            if (x := line.find(text)) >= 0:
                char = self._screen.buffer[y][x]
                names = [n for n in ("bold", "italics", "underscore") if getattr(char, n)]
                return " ".join([*names, *([] if char.fg == "default" else [char.fg])])
        raise AssertionError(f"{text!r} is not on the screen:\n{self.text}")

    def wait(self, condition: str | Callable[[], object]) -> None:
        """Waits until the screen has the text or the condition holds; fails after DEADLINE."""
        end = time.monotonic() + DEADLINE
        holds = (lambda: condition in self.everything) if isinstance(condition, str) else condition
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"never came: {condition!r}; the screen:\n{self.text}")
            if not self._drain(0.2) and self._code is not None and not holds():
                raise AssertionError(f"ended without: {condition!r}; the screen:\n{self.text}")

    def wait_prompt(self, prompt: str = "> ") -> None:
        """Waits until the cursor stands after an empty prompt."""
        self.wait(lambda: self.at_prompt(prompt))

    def at_prompt(self, prompt: str = "> ") -> bool:
        """Returns whether the cursor stands after an empty prompt."""
        return self.cursor[0] == len(prompt) and self._line() == prompt.rstrip()

    def _line(self) -> str:
        return self.display[self.cursor[1]]

    def wait_end(self) -> int:
        """Waits for the end of the program; returns its exit code (negative: the signal)."""
        self.wait(lambda: self._code is not None)
        self._drain(0.0)
        assert self._code is not None
        return self._code

    def _drain(self, timeout: float) -> bool:
        """Reads the output of the program; returns whether there was any."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        came = False
        if self._fd < 0:
            time.sleep(timeout)
            return False
        while select.select([self._fd], [], [], 0.0 if came else timeout)[0]:
            data = os.read(self._fd, 65536)
            self.raw += data
            self._stream.feed(data)
            came = True
        return came

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._slave)


def _row(line: Mapping[int, pyte.screens.Char], columns: int) -> str:
    """Returns a row of the scrollback, as `display` shows it."""
    return "".join(line[x].data for x in range(columns)).rstrip()
