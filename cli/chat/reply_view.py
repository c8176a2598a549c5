"""Shows a reply as it comes: Markdown on a terminal, plain text elsewhere."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import Protocol, TextIO

from rich.text import Text

from ..terminal.blocks import BlockStream
from ..terminal.layout import wrap
from ..terminal.markdown import render
from ..terminal.screen import Screen
from ..terminal.texts import clean
from .reply_status import progress_line

PAINT_EVERY = 0.1  # seconds between two paints of the live part, at least
PAINT_SHARE = 0.2  # most of the time that painting takes
PATIENCE = 0.5  # seconds after which a bar shows how far the prompt is read


class View(Protocol):
    """Where the parts of a reply go."""

    def progress(self, done: int, total: int) -> None:
        """So many tokens of the prompt are read."""

    def delta(self, kind: str, text: str) -> None:
        """More "text" or "reasoning"."""

    def refresh(self) -> float | None:
        """Paints what is due; returns the seconds until something will be, None: nothing is."""

    def touch(self) -> None:
        """What is on the screen is no longer right: it has another size."""

    def finish(self) -> None:
        """The reply is complete: shows what is left of it."""


class _Phase(Enum):
    WAITING = auto()
    THINKING = auto()
    ANSWERING = auto()


class MarkdownView:
    """Prints finished blocks once and paints the last one again as it grows.

    Reasoning is dim, or a count of its characters. `before` is the text of the reply that is on the
    screen already, when it is continued: its last block is shown again with what comes.
    """

    def __init__(self, screen: Screen, *, show_reasoning: bool, before: str = "") -> None:
        self._screen = screen
        self._show_reasoning = show_reasoning
        self._blocks = BlockStream()
        self._blocks.resume(before)
        self._phase = _Phase.WAITING
        self._blank = not before  # nothing but white space has come
        self._reasoning = ""  # what is not printed of it
        self._thought = 0  # characters of it
        self._progress = (0, 0)
        self._clock = _Eta()
        self._above: list[Text] = []  # to be printed with the next paint
        self._dirty = True
        self._due = time.monotonic() + PATIENCE

    def progress(self, done: int, total: int) -> None:
        """As View."""
        self._progress = (done, total)
        self._clock.seen(done)
        self._dirty = True

    def delta(self, kind: str, text: str) -> None:
        """As View."""
        if self._phase is _Phase.WAITING:
            self._due = 0.0
        if kind == "reasoning":
            self._phase = _Phase.THINKING
            self._thought += len(text)
            self._reasoning += clean(text) if self._show_reasoning else ""
        else:
            self._end_thinking()
            self._phase = _Phase.ANSWERING
            if self._blank:
                text = text.lstrip("\n")
                self._blank = not text.strip()
            self._blocks.feed(text)
        self._dirty = True

    def refresh(self) -> float | None:
        """As View."""
        if not self._dirty:
            return None
        start = time.monotonic()
        if start < self._due:
            return self._due - start
        self._print_finished()
        self._screen.paint(self._live(), self._above)
        self._above = []
        self._dirty = False
        end = time.monotonic()
        self._due = end + max(PAINT_EVERY, (end - start) / PAINT_SHARE)
        return None

    def touch(self) -> None:
        """As View."""
        self._dirty = True
        if self._phase is not _Phase.WAITING:
            self._due = 0.0

    def finish(self) -> None:
        """As View."""
        self._end_thinking()
        for block in [*self._blocks.finished(), *self._blocks.finish()]:
            self._above += render(block, self._screen.width, fold_code=False)
        self._screen.paint([], self._above)
        self._above = []
        self._dirty = False

    def _print_finished(self) -> None:
        width = self._screen.width
        for block in self._blocks.finished():
            self._above += render(block, width, fold_code=False)
        done, newline, rest = self._reasoning.rpartition("\n")
        if newline:
            self._above += wrap(_faint(done), width)
            self._reasoning = rest

    def _live(self) -> list[Text]:
        width = self._screen.width
        if self._phase is _Phase.WAITING:
            done, total = self._progress
            if not total:
                return [_faint("waiting for the first token"[: width - 1])]
            left = self._clock.left(done, total)
            return [_faint(progress_line(done, total, left, width))]
        if self._phase is _Phase.THINKING:
            if not self._show_reasoning:
                return [_faint(f"thinking: {self._thought:,} characters"[: width - 1])]
            return wrap(_faint(self._reasoning), width)
        return [line for block in self._blocks.rest() for line in render(block, width)]

    def _end_thinking(self) -> None:
        if self._phase is not _Phase.THINKING:
            return
        text = self._reasoning.rstrip("\n")
        if not self._show_reasoning:
            text = f"thought: {self._thought:,} characters, /think show shows them"
        self._above += wrap(_faint(text), self._screen.width) if text else []
        self._above.append(Text())
        self._reasoning = ""
        self._phase = _Phase.ANSWERING


class PlainView:
    """Writes the answer to `out` as it comes, reasoning to the screen."""

    def __init__(self, screen: Screen, out: TextIO, *, show_reasoning: bool) -> None:
        self._screen = screen
        self._out = out
        self._show_reasoning = show_reasoning
        self._thinking = False
        self._last = "\n"

    def progress(self, done: int, total: int) -> None:
        """Shows nothing."""

    def delta(self, kind: str, text: str) -> None:
        """As View."""
        text = clean(text) if self._out.isatty() else text
        if kind == "reasoning":
            if self._show_reasoning:
                self._screen.write(clean(text) if self._thinking else "thinking: " + clean(text))
                self._thinking = True
            return
        self._end_thinking()
        if text:
            self._out.write(text)
            self._out.flush()
            self._last = text[-1]

    def refresh(self) -> float | None:
        """There is nothing to be painted."""
        return None

    def touch(self) -> None:
        """There is nothing to be painted."""

    def finish(self) -> None:
        """As View."""
        self._end_thinking()
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._screen.write("\n\n")


class _Eta:
    """How long the rest of a prompt takes, from the speed since the first news of it."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def seen(self, done: int) -> None:
        """So many tokens are read now."""
        if self._first is None:
            self._first = (time.monotonic(), done)

    def left(self, done: int, total: int) -> float | None:
        """Seconds; None while nobody can tell."""
        if self._first is None or done <= self._first[1]:
            return None
        start, already = self._first
        return (time.monotonic() - start) * (total - done) / (done - already)


def _faint(text: str) -> Text:
    return Text(text, style="dim")
