"""Tables, laid out by rich: facts in columns, and the figures of reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .layout import lines_of, wrap
from .screen import ENDLESS, Screen

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


def report_console() -> Console:
    """Returns the console for reports on stdout; without a terminal, no line is wrapped."""
    return Console() if sys.stdout.isatty() else Console(width=ENDLESS, color_system=None)


def figures(title: str, *names: str) -> Table:
    """Returns an empty table of figures for `report_console`, without a box outside a terminal.

    Args:
        title: Line above the table.
        names: Heads of the columns, which are aligned to the right.
    """
    style = box.HEAVY_HEAD if sys.stdout.isatty() else None
    table = Table(title=title, title_justify="left", box=style)
    for name in names:
        table.add_column(name, justify="right")
    return table
