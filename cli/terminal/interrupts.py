"""Turns signals into messages, so that no handler interrupts the chat half-way."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from enum import Enum, auto
from queue import SimpleQueue
from types import FrameType
from typing import Any


class Signal(Enum):
    """Request of the user or the terminal while a reply is generated."""

    STOP = auto()  # Ctrl-C
    SUSPEND = auto()  # Ctrl-Z
    RESIZE = auto()


_MESSAGES = {
    signal.SIGINT: Signal.STOP,
    signal.SIGTSTP: Signal.SUSPEND,
    signal.SIGWINCH: Signal.RESIZE,
}


class Interrupts:
    """A context in which Ctrl-C only sets `pressed`; SIGTERM and SIGHUP raise SystemExit."""

    def __init__(self) -> None:
        self.pressed = False  # Ctrl-C since it was last cleared
        self._queue: SimpleQueue[Any] | None = None
        self._raises = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._message),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _leave),
            signal.SIGHUP: signal.signal(signal.SIGHUP, _leave),
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which the first Ctrl-C before `to()` also raises KeyboardInterrupt."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    @contextlib.contextmanager
    def to(self, queue: SimpleQueue[Any]) -> Iterator[None]:
        """Puts Ctrl-C, Ctrl-Z and resizes in the queue, also a Ctrl-C pressed just before."""
        self._queue, self._raises = queue, False
        before = {
            number: signal.signal(number, self._message)
            for number in (signal.SIGTSTP, signal.SIGWINCH)
        }
        if self.pressed:
            queue.put(Signal.STOP)
        try:
            yield
        finally:
            self._queue = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def _message(self, number: int, _frame: FrameType | None) -> None:
        message = _MESSAGES[signal.Signals(number)]
        if message is Signal.STOP:
            self.pressed = True
        if self._queue is not None:
            self._queue.put(message)  # put() of a SimpleQueue is reentrant
        elif self._raises and message is Signal.STOP:
            self._raises = False
            raise KeyboardInterrupt


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
