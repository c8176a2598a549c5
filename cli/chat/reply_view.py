"""Shows a reply while it is generated: Markdown on a terminal, plain text elsewhere.

The Markdown view does not use `rich.live.Live` with `rich.markdown.Markdown`. That pair renders the
whole reply again on each refresh (quadratic in its length), cannot show more rows than the screen
has, and leaves text in the scrollback that later Markdown has changed. This view prints each
finished block once, above a live part with the unfinished block, and repaints only the live part.
"""

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

PAINT_EVERY = 0.1  # seconds between two paints, at least
PAINT_SHARE = 0.2  # fraction of the time spent painting, at most
PATIENCE = 0.5  # seconds until the progress of the prefill is shown


class View(Protocol):
    """Receives the events of a reply."""

    def progress(self, done: int, total: int) -> None:
        """Reports that `done` of `total` tokens of the prompt are computed."""

    def delta(self, kind: str, text: str) -> None:
        """Adds text of the kind "text" or "reasoning"."""

    def refresh(self) -> float | None:
        """Paints if it is due; returns the seconds until the next paint, None without changes."""

    def touch(self) -> None:
        """Requests a repaint, because the size of the screen has changed."""

    def finish(self) -> None:
        """Shows the rest of a complete reply."""


class _Phase(Enum):
    WAITING = auto()
    THINKING = auto()
    ANSWERING = auto()


class MarkdownView:
    """Prints finished blocks once and repaints the unfinished one while it grows.

    Args:
        screen: The terminal.
        show_reasoning: Show reasoning, dimmed; otherwise only its length.
        before: Text of a continued reply that is already shown; its last block is shown again.
    """

    def __init__(self, screen: Screen, *, show_reasoning: bool, before: str = "") -> None:
        self._screen = screen
        self._show_reasoning = show_reasoning
        self._blocks = BlockStream()
        self._blocks.resume(before)
        self._phase = _Phase.WAITING
        self._blank = not before  # only white space so far
        self._reasoning = ""  # the part that is not printed yet
        self._thought = 0  # characters of reasoning
        self._progress = (0, 0)
        self._clock = _Eta()
        self._above: list[Text] = []  # printed with the next paint
        self._dirty = True
        self._due = time.monotonic() + PATIENCE

    def progress(self, done: int, total: int) -> None:
        """Implements `View`."""
        self._progress = (done, total)
        self._clock.seen(done)
        self._dirty = True

    def delta(self, kind: str, text: str) -> None:
        """Implements `View`."""
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
        """Implements `View`."""
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
        """Implements `View`."""
        self._dirty = True
        if self._phase is not _Phase.WAITING:
            self._due = 0.0

    def finish(self) -> None:
        """Implements `View`."""
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
    """Writes the answer to `out` and reasoning to the screen, without formatting."""

    def __init__(self, screen: Screen, out: TextIO, *, show_reasoning: bool) -> None:
        self._screen = screen
        self._out = out
        self._show_reasoning = show_reasoning
        self._thinking = False
        self._last = "\n"

    def progress(self, done: int, total: int) -> None:
        """Shows nothing."""

    def delta(self, kind: str, text: str) -> None:
        """Implements `View`."""
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
        """Does nothing: the text is already written."""
        return None

    def touch(self) -> None:
        """Does nothing: the text is already written."""

    def finish(self) -> None:
        """Implements `View`."""
        self._end_thinking()
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()

    def _end_thinking(self) -> None:
        if self._thinking:
            self._thinking = False
            self._screen.write("\n\n")


class _Eta:
    """Predicts the remaining time of a prefill from its speed so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def seen(self, done: int) -> None:
        """Records that `done` tokens are computed now."""
        if self._first is None:
            self._first = (time.monotonic(), done)

    def left(self, done: int, total: int) -> float | None:
        """Returns the remaining seconds; None while the speed is unknown."""
        if self._first is None or done <= self._first[1]:
            return None
        start, already = self._first
        return (time.monotonic() - start) * (total - done) / (done - already)


def _faint(text: str) -> Text:
    return Text(text, style="dim")
