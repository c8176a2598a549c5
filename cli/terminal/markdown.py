"""Renders Markdown tokens as lines of styled text that fit a width.

`rich.markdown.Markdown` renders whole documents only. The live view needs single blocks and items,
unfinished code, and tables that stay readable on narrow screens; tables and code use rich.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from markdown_it.token import Token
from rich import box
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from .blocks import Block, groups
from .layout import TAB, lines_of, wrap
from .texts import clean

LEAST = 8  # columns of nested text and of long words in tables, at least
RULE = 40  # columns of a horizontal rule, at most
CONTEXT = 100  # preceding lines of code that are parsed to colour a line
BETWEEN = 3  # columns between two cells of a table
_INLINE = {"strong_open": "bold", "em_open": "italic", "s_open": "strike", "link_open": "underline"}
_HEADINGS = {"h1": "bold underline", "h2": "bold", "h3": "bold italic"}
_JUSTIFY: dict[str, JustifyMethod] = {"text-align:right": "right", "text-align:center": "center"}
_CODE, _FAINT, _MARK = "cyan", "dim", "cyan"


def render(block: Block, width: int, *, fold_code: bool = True) -> list[Text]:
    """Renders a block as lines of at most `width` columns.

    Args:
        block: The block.
        width: Columns of the screen.
        fold_code: Fold long lines of a top-level code block. Otherwise the terminal wraps them, so
            that they are copied unchanged.
    """
    lines = [Text()] if block.gap else []
    head = block.tokens[0]
    if head.type == "fence":
        return lines + _fence(head, width if fold_code else None, block.skip, block.open)
    return lines + _blocks(block.tokens, width)


def fold(text: Text, width: int) -> list[Text]:
    """Cuts a line at exactly `width` columns, as a terminal does."""
    lines, start, used = [], 0, 0
    plain = text.plain
    for i, char in enumerate(plain):
        size = cell_len(char)
        if used + size > width and i > start:
            lines.append(text[start:i])
            start, used = i, 0
        used += size
    return [*lines, text[start:]]


def _blocks(tokens: list[Token], width: int, tight: bool = False) -> list[Text]:
    """Renders all blocks, with blank lines between them unless `tight`."""
    lines: list[Text] = []
    for group in groups(tokens, tokens[0].level if tokens else 0):
        found = _block(group, max(LEAST, width))
        if lines and found and not tight:
            lines.append(Text())
        lines += found
    return lines


def _block(group: list[Token], width: int) -> list[Text]:
    head = group[0]
    if head.type in ("paragraph_open", "heading_open"):
        style = _HEADINGS.get(head.tag, "italic") if head.type == "heading_open" else ""
        text = _inline(group[1].children or [])
        text.style = style
        return wrap(text, width)
    if head.type in ("fence", "code_block"):
        return _fence(head, width)
    if head.type == "blockquote_open":
        bar = Text("│ ", style=_FAINT)
        return [bar + line for line in _blocks(group[1:-1], width - 2)]
    if head.type in ("bullet_list_open", "ordered_list_open"):
        return list(_list(group, width))
    if head.type == "table_open":
        return _table(group, width)
    if head.type == "hr":
        return [Text("─" * min(width, RULE), style=_FAINT)]
    return wrap(Text(clean(head.content)), width)


def _list(group: list[Token], width: int) -> Iterator[Text]:
    number = int(group[0].attrs.get("start", 1))
    for item in groups(group[1:-1], group[0].level + 1):
        mark = "• " if group[0].type == "bullet_list_open" else f"{number}. "
        number += 1
        inside = item[1:-1]
        tight = any(t.type == "paragraph_open" and t.hidden for t in inside)
        lines = _blocks(inside, width - len(mark), tight) or [Text()]
        yield Text(mark, style=_MARK) + lines[0]
        for line in lines[1:]:
            yield Text(" " * len(mark)) + line if line.plain else line


def _fence(token: Token, width: int | None, skip: int = 0, is_open: bool = False) -> list[Text]:
    """Renders code with its fences. `width` None: lines are not folded."""
    language = clean(token.info).split(" ")[0].strip()
    start = max(0, skip - CONTEXT)
    code = clean(token.content).expandtabs(TAB).removesuffix("\n")
    code = "\n".join(code.split("\n")[start:])
    text = _highlighted(code, language)
    lines = list(text.split("\n", allow_blank=True))[skip - start :] if code else []
    if width is not None:
        lines = [part for line in lines for part in fold(line, width)]
    fence = token.markup if token.type == "fence" else "```"
    above = [] if skip else [Text(fence + language, style=_FAINT)]
    return [*above, *lines, *([] if is_open else [Text(fence, style=_FAINT)])]


def _highlighted(code: str, language: str) -> Text:
    """Returns the code in colours of the terminal's palette; plain for unknown languages."""
    if not language:
        return Text(code)
    from rich.syntax import Syntax

    is_light = os.environ.get("COLORFGBG", "").endswith((";7", ";15"))
    theme = "ansi_light" if is_light else "ansi_dark"
    text = Syntax(code, language, theme=theme, background_color="default").highlight(code)
    text.no_wrap = False
    if len(text) > len(code):  # a lexer may add a newline
        text.right_crop(len(text) - len(code))
    return text if text.plain == code else Text(code)


def _table(group: list[Token], width: int) -> list[Text]:
    """Renders a table; on a narrow screen as a list of its rows."""
    rows = [
        [_cell(cell) for cell in groups(row[1:-1], row[0].level + 1)]
        for part in groups(group[1:-1], group[0].level + 1)
        for row in groups(part[1:-1], part[0].level + 1)
    ]
    header, *body = rows
    columns = [[row[i][0] for row in rows if i < len(row)] for i in range(len(header))]
    sizes = _widths(columns, width - BETWEEN * (len(columns) - 1))
    if sizes is None:
        return list(_records(rows, width))
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        header_style="bold",
        border_style=_FAINT,
    )
    for (text, justify), size in zip(header, sizes, strict=True):
        table.add_column(text, justify=justify, overflow="fold", width=size)
    for row in body:
        table.add_row(*(text for text, _ in row))
    return lines_of(table, width)


def _widths(columns: list[list[Text]], room: int) -> list[int] | None:
    """Returns column widths that fit `room`, shrinking the widest; None if words would be cut."""
    found = [max(text.cell_len for text in column) for column in columns]
    least = [
        min(
            max((cell_len(word) for text in column for word in text.plain.split()), default=1),
            LEAST,
        )
        for column in columns
    ]
    if sum(least) > room:
        return None
    while sum(found) > room:
        widest = max((i for i in range(len(found)) if found[i] > least[i]), key=found.__getitem__)
        found[widest] -= 1
    return found


def _records(rows: list[list[tuple[Text, JustifyMethod]]], width: int) -> Iterator[Text]:
    header, *body = rows
    for i, row in enumerate(body or [[]]):
        if i:
            yield Text()
        for (name, _), (value, _) in zip(header, row, strict=False):
            label = name.copy()
            label.stylize("bold")
            yield from wrap(label + Text(": ") + value, width)


def _cell(group: list[Token]) -> tuple[Text, JustifyMethod]:
    children = [t for token in group for t in token.children or []]
    return _inline(children), _JUSTIFY.get(str(group[0].attrs.get("style", "")), "left")


def _inline(tokens: list[Token]) -> Text:
    """Renders emphasis, code and links. A line break of the source stays a line break."""
    text = Text()
    styles: list[str] = []
    links: list[tuple[int, str]] = []
    for token in tokens:
        content = clean(token.content)
        if token.type in _INLINE:
            styles.append(_INLINE[token.type])
            if token.type == "link_open":
                links.append((len(text), clean(str(token.attrs.get("href", "")))))
        elif token.nesting < 0:
            styles.pop()
            if token.type == "link_close":
                _add_target(text, *links.pop())
        elif token.type in ("softbreak", "hardbreak"):
            text.append("\n")
        elif token.type == "code_inline":
            text.append(content, " ".join([*styles, _CODE]))
        elif token.type == "image":
            start = len(text)
            text.append(content or "image", " ".join([*styles, "italic"]))
            _add_target(text, start, clean(str(token.attrs.get("src", ""))))
        else:
            text.append(content, " ".join(styles))
    return text


def _add_target(text: Text, start: int, target: str) -> None:
    """Appends the target of a link, unless the text is the target."""
    if target and text.plain[start:] not in (target, target.removeprefix("mailto:")):
        text.append(f" ({target})", _FAINT)
