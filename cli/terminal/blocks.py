"""Cuts growing Markdown into blocks, so that finished blocks are printed once.

rich renders complete Markdown only; it does not report which part of a growing text is final.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markdown_it import MarkdownIt
from markdown_it.token import Token

from .texts import clean

CODE_PART = 16  # lines of an unfinished code block that are emitted at a time


@dataclass(frozen=True)
class Block:
    """One top-level block, one item of a top-level list, or some lines of a code block.

    Attributes:
        tokens: The Markdown tokens of the block.
        gap: A blank line precedes the block.
        skip: Lines of code that earlier blocks contained.
        open: The end of the code is not reached yet.
    """

    tokens: list[Token]
    gap: bool = False
    skip: int = 0
    open: bool = False


@dataclass(frozen=True)
class _Piece:
    """A parsed block that starts at `line`; `item` is its index in its list."""

    tokens: list[Token]
    line: int
    item: int | None = None


@dataclass(frozen=True)
class _Place:
    """Number of emitted blocks, and of items or code lines of the first unfinished block."""

    blocks: int = 0
    items: int = 0
    first_number: int = 1
    blank: bool = False  # a blank line followed the last item
    code: int = 0


class BlockStream:
    """Takes text and returns blocks. A call costs time in the unfinished block, not in the text.

    A block is finished once no later text can belong to it, at the latest when the first line of
    the next block is complete. HTML and reference definitions are shown as text, because a
    definition may follow text that is already printed.
    """

    def __init__(self) -> None:
        parser = MarkdownIt("commonmark", {"html": False})
        self._parser = parser.enable(["table", "strikethrough"]).disable("reference")
        self._text = ""  # from the start of the first unfinished block
        self._place = _Place()

    def feed(self, text: str) -> None:
        """Appends text."""
        self._text += clean(text)

    def resume(self, text: str) -> None:
        """Starts after `text`, which has been shown; its last block is unfinished."""
        self._text = clean(text) + "\n"
        self.finished()
        self._text = self._text[:-1]
        self._place = replace(self._place, blocks=0, blank=False)

    def finished(self) -> list[Block]:
        """Returns the blocks finished since the last call."""
        text = self._text[: self._text.rfind("\n") + 1]
        pieces = self._pieces(text)
        if not pieces:
            return []
        last = pieces[-1]
        if _is_final(last, text.split("\n")):
            found = self._emit(text, pieces, [*pieces[1:], None])
            self._text = self._text[_offset(text, _end(last.tokens[0])) :]
            return found
        found = self._emit(text, pieces, pieces[1:])
        self._text = self._text[_offset(text, last.line) :]
        code = last.tokens[0]
        count = code.content.count("\n")
        if code.type == "fence" and count - self._place.code >= CODE_PART:
            found.append(replace(self._block(last), open=True))
            self._place = replace(self._place, code=count)
        return found

    def rest(self) -> list[Block]:
        """Returns the unfinished rest, mostly one block."""
        place = self._place
        pieces = self._pieces(self._text)
        found = self._emit(self._text, pieces, [*pieces[1:], None])
        self._place = place
        return found

    def finish(self) -> list[Block]:
        """Returns the rest at the end of the text."""
        found = self.rest()
        self._text, self._place = "", _Place(blocks=1)
        return found

    def _emit(self, text: str, pieces: list[_Piece], after: Sequence[_Piece | None]) -> list[Block]:
        """Returns the blocks of pieces with an entry in `after`: the following piece, or None."""
        found = []
        lines = text.split("\n")
        for piece, following in zip(pieces, after, strict=False):
            found.append(self._block(piece))
            place = replace(self._place, blocks=self._place.blocks + 1, items=0, code=0)
            if following is not None and following.item:
                blank = not lines[following.line - 1].strip()
                place = replace(place, items=self._place.items + 1, blank=blank)
            self._place = place
        return found

    def _block(self, piece: _Piece) -> Block:
        place, head = self._place, piece.tokens[0]
        gap = place.blocks > 0
        if piece.item is not None:
            if place.items == 0:
                self._place = replace(place, first_number=int(head.attrs.get("start", 1)))
            else:
                gap = place.blank
            if head.type == "ordered_list_open":
                head.attrs["start"] = self._place.first_number + place.items
        is_open = head.type == "fence" and _is_open(head)
        return Block(piece.tokens, gap and not place.code, place.code, is_open)

    def _pieces(self, text: str) -> list[_Piece]:
        return [piece for group in groups(self._parser.parse(text), 0) for piece in _split(group)]


def groups(tokens: list[Token], level: int) -> Iterator[list[Token]]:
    """Yields the blocks of a level, each from its opening to its closing token."""
    start = 0
    for i, token in enumerate(tokens):
        if token.level == level and token.nesting <= 0:
            yield tokens[start : i + 1]
            start = i + 1


def _split(group: list[Token]) -> Iterator[_Piece]:
    """Splits a list into one list per item; other blocks stay whole."""
    head = group[0]
    if head.type not in ("bullet_list_open", "ordered_list_open"):
        yield _Piece(group, _line(head))
        return
    for i, item in enumerate(groups(group[1:-1], 1)):
        yield _Piece([head.copy(attrs=dict(head.attrs)), *item, group[-1]], _line(item[0]), i)


def _line(token: Token) -> int:
    return token.map[0] if token.map else 0


def _end(token: Token) -> int:
    return token.map[1] if token.map else 0


def _is_final(piece: _Piece, lines: list[str]) -> bool:
    """Returns whether no further line can belong to the piece. The last of `lines` is partial."""
    head = piece.tokens[0]
    if head.type in ("heading_open", "hr"):
        return True
    if head.type == "fence":
        return not _is_open(head)
    end = _end(head)
    closed_by_blank = ("paragraph_open", "table_open", "blockquote_open")
    return head.type in closed_by_blank and end < len(lines) - 1 and not lines[end].strip()


def _is_open(fence: Token) -> bool:
    """Returns whether the closing fence of the code is missing."""
    first, end = fence.map or (0, 0)
    return end - first <= fence.content.count("\n") + 1


def _offset(text: str, line: int) -> int:
    """Returns the offset at which a line starts."""
    at = 0
    for _ in range(line):
        at = text.index("\n", at) + 1
    return at
