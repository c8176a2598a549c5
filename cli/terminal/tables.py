"""Tables, laid out by rich: facts in columns, and the figures of reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from .layout import lines_of, wrap
from .screen import Screen

GAP = 2
"""Columns between two cells."""


def columns(screen: Screen, rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Prints rows of cells in aligned columns.

    The last cell wraps in its column. If the other columns take more than half of the screen, it
    follows below them, indented: rich has no such layout for narrow terminals.

    Args:
        screen: Where to print.
        rows: Rows of equal length.
        styles: Styles of the columns, from the left; missing ones are plain.
    """
    texts = [
        [Text(cell, style=styles[i] if i < len(styles) else "") for i, cell in enumerate(row)]
        for row in rows
    ]
    if not texts:
        return
    width = screen.width
    start = sum(max(row[i].cell_len for row in texts) + GAP for i in range(len(texts[0]) - 1))
    if start > width // 2:
        for *head, last in texts:
            lines = wrap(Text(" " * GAP).join(head), width)
            lines += [Text(" " * GAP) + line for line in wrap(last, width - GAP)]
            screen.print(*(line for line in lines if line.plain.strip()))
        return
    table = Table.grid(padding=(0, GAP, 0, 0))
    for i in range(len(texts[0])):
        table.add_column(no_wrap=i < len(texts[0]) - 1, overflow="fold")
    for row in texts:
        table.add_row(*row)
    screen.print(*lines_of(table, width))


class ReportPrinter:
    """Prints the text and the tables of a report on stdout.

    Outside a terminal they have no box characters, wrapped lines or trailing spaces.
    """

    def __init__(self) -> None:
        self._screen = Screen()

    def print(self, part: str | Table) -> None:
        """Prints a line of text, or a table after its title, which no width of columns cuts."""
        if isinstance(part, str):
            self._line(part)
            return
        title, part.title = part.title, None
        if title:
            self._line(str(title), "table.title")
        self._screen.print(*lines_of(part, self._screen.width))

    def _line(self, text: str, style: str = "") -> None:
        self._screen.print(Text(text, style=style))


def figures(title: str, *names: str) -> Table:
    """Returns an empty table of figures, without a box outside a terminal.

    Args:
        title: Line above the table.
        names: Heads of the columns, which are aligned to the right.
    """
    plain = not sys.stdout.isatty()
    style = None if plain else box.HEAVY_HEAD
    padding = (0, GAP, 0, 0) if plain else (0, 1)
    table = Table(title=title, title_justify="left", box=style, pad_edge=not plain, padding=padding)
    for name in names:
        table.add_column(name, justify="right")
    return table
