"""Texts in so many columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import set_cell_size
from rich.text import Text

from .layout import wrap
from .screen import Screen


def columns(screen: Screen, rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Rows of cells under each other; the last cell is wrapped, or cut off in its own lines where
    the screen is narrow."""
    table = [list(row) for row in rows]
    if not table:
        return
    width = screen.width
    sizes = [max(Text(row[i]).cell_len for row in table) for i in range(len(table[0]) - 1)]
    start = sum(sizes) + 2 * len(sizes)
    for row in table:
        texts = [Text(cell, style=_style(styles, i)) for i, cell in enumerate(row)]
        if start > width // 2:  # no room beside them
            head = Text("  ").join(texts[:-1])
            lines = wrap(head, width) + [Text("  ") + line for line in wrap(texts[-1], width - 2)]
            screen.print(*(line for line in lines if line.plain.strip()))
            continue
        head = Text()
        for text, size in zip(texts[:-1], sizes, strict=True):
            head += Text(set_cell_size(text.plain, size), style=text.style) + Text("  ")
        first, *rest = wrap(texts[-1], width - start)
        head += first
        head.rstrip()
        screen.print(head, *(Text(" " * start) + line for line in rest))


def _style(styles: Sequence[str], i: int) -> str:
    return styles[i] if i < len(styles) else ""
