"""Lays out text and rich's renderables as lines that fit a width."""

from __future__ import annotations

import functools
import io

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.text import Text

from .texts import CONTROL, clean

TAB = 4


def wrap(text: Text, width: int) -> list[Text]:
    """Wraps a text at word borders; longer words are cut."""
    lines = list(text.wrap(_console(), max(1, width), tab_size=TAB)) or [Text()]
    for line in lines:
        line.rstrip()
    return lines


def clean_text(text: Text) -> Text:
    """Returns the text with its styles and without the control characters that `clean` removes."""
    cuts = [at for found in CONTROL.finditer(text.plain) for at in found.span()]
    if not cuts:
        return text
    return Text().join(part for part in text.divide(cuts) if clean(part.plain))


def short(text: str, width: int) -> str:
    """Shortens a text to one line of at most `width` columns, with an ellipsis."""
    text = " ".join(text.split(" ")).replace("\n", " ").replace("\t", " ")
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(1, width) - 1).rstrip() + "…"


def lines_of(renderable: RenderableType, width: int) -> list[Text]:
    """Renders with rich and returns the lines without trailing spaces."""
    console = _console()
    lines = console.render_lines(renderable, console.options.update(width=width), pad=False)
    texts = [Text.assemble(*((s.text, s.style or "") for s in line)) for line in lines]
    for text in texts:
        text.rstrip()
    return texts


@functools.cache
def _console() -> Console:
    """Returns the console that measures and lays out; nothing is written to it."""
    return Console(file=io.StringIO(), width=80, color_system=None, markup=False, emoji=False)
