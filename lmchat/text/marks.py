"""Marks in messages, by which texts are located in a rendering.

A mark is a private-use character that no text of the conversation has. Templates copy it like any
letter; taken out again, the rendering must be what it is without marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")


class Marks:
    """Returns characters that none of `texts` contains, each once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._used = set(_PRIVATE.findall("".join(texts)))
        self._next = _FIRST
        self._ours: list[str] = []
        self.begin, self.end = self.take(), self.take()
        """Puts marks around text in which no token of the template is recognized."""

    def take(self) -> str:
        """Returns a new mark."""
        while chr(self._next) in self._used:
            self._next += 1
        self._next += 1
        self._ours.append(chr(self._next - 1))
        return self._ours[-1]

    def literal(self, text: str) -> str:
        """`text` with the marks for plain text around it, white space at its ends outside."""
        return around(text, text.strip(), self.begin, self.end, last=True)

    def around_places(self, text: str, start: int, end: int, places: Sequence[Found]) -> str:
        """Returns `text[start:end]` with the marks for plain text around these parts of `text`."""
        parts, at = [], start
        for place in places:
            first, last = max(place.start, at), min(place.end, end)
            if first < last:
                parts += [text[at:first], self.begin, text[first:last], self.end]
                at = last
        return "".join([*parts, text[at:end]])

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Returns the parts of a rendering without marks, and whether each is plain text."""
        plain = False
        for part in re.split(f"([{self.begin}{self.end}])", text):
            if part == self.begin or part == self.end:
                plain = part == self.begin
            elif part:
                yield part, plain

    def are_paired(self, text: str) -> bool:
        """Returns whether the marks for plain text in a rendering open and close in turn."""
        found = re.findall(f"[{self.begin}{self.end}]", text)
        return found == [self.begin, self.end] * (len(found) // 2)

    def bare(self, text: str) -> str:
        """`text` without any of these marks."""
        return text.translate(dict.fromkeys(map(ord, self._ours)))

    def without_literals(self, text: str) -> str:
        """`text` without the marks for plain text."""
        return text.replace(self.begin, "").replace(self.end, "")


@dataclass(frozen=True)
class Found:
    """The position of a marked text in a rendering without the marks."""

    start: int
    end: int


def locate(marked: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, list[Found | None]]:
    """Returns the rendering without the marks of `pairs`, and the position of each pair.

    None for a pair that the template dropped, tore apart or repeated.
    """
    number = {mark: i for i, pair in enumerate(pairs) for mark in pair}
    places: dict[str, list[int]] = {}
    clean: list[str] = []
    at = length = 0
    for match in _PRIVATE.finditer(marked):
        if match.group() in number:
            clean.append(marked[at : match.start()])
            length += match.start() - at
            at = match.end()
            places.setdefault(match.group(), []).append(length)
    clean.append(marked[at:])
    found: list[Found | None] = []
    for before, after in pairs:
        starts, ends = places.get(before, []), places.get(after, [])
        whole = len(starts) == len(ends) == 1 and starts[0] <= ends[0]
        found.append(Found(starts[0], ends[0]) if whole else None)
    return "".join(clean), found


def around(text: str, part: str, before: str, after: str, *, last: bool) -> str:
    """`text` with marks around `part`, where it stands last or first."""
    at = text.rfind(part) if last else text.find(part)
    if not part:
        at = len(text)
    return text[:at] + before + part + after + text[at + len(part) :]
