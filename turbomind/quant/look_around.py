"""A matcher of patterns with look-around in bounded time.

A set of places in a text is an integer, bit p for the place before character p. Each part of a
pattern turns a set into the places where its matches end, so no path is tried twice. Only a
look-around is tried for each place by itself; a budget bounds that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

from turbomind.errors import ModelError

MAX_STEPS = 5_000_000  # of one pattern in all texts; a few seconds

# The parser of Python's `re`, which has no public name.
_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_UNICODE = 32  # the one flag that a pattern has by itself
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_OTHERS = ("AT", "BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "ASSERT", "ASSERT_NOT")
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda char: char.isalnum() or char == "_",
}


class LookAround:
    """A pattern that matches from the start of a text, not to its end, as `re.match`.

    Args:
        pattern: Without backreferences, flags and atomic groups.

    Raises:
        ValueError: The pattern has another part, or cannot be read.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._nodes = _parser.parse(pattern)
            if self._nodes.state.flags != _UNICODE:
                raise ValueError("flags are not supported")
            for name in map(str, _operations(self._nodes)):
                if name not in (*_CHARACTERS, *_OTHERS):
                    raise ValueError(f"{name.lower()} is not supported")
        except (RecursionError, OverflowError, _parser.error) as error:
            raise ValueError(str(error)) from error
        self._steps = 0

    def __call__(self, text: str) -> bool:
        """Returns whether a text matches; raises ModelError where that takes too long."""
        search = _Search(text, MAX_STEPS - self._steps)
        try:
            return search.ends(self._nodes, 1) != 0
        finally:
            self._steps += search.steps


class _Search:
    """A search in one text."""

    def __init__(self, text: str, max_steps: int) -> None:
        self.text = text
        self.steps, self._max_steps = 0, max_steps
        self._occurrences: dict[int, int] = {}

    def ends(self, nodes: Any, places: int) -> int:
        """Returns where matches of a sequence end that begin at places."""
        for node in nodes:
            self.steps += 1
            if self.steps > self._max_steps:
                raise ModelError(f"a pattern with look-around takes more than {MAX_STEPS} steps")
            if not places:
                break
            name, value = str(node[0]), node[1]
            if name in _CHARACTERS:
                places = (places & self._of_characters(node)) << 1
            elif name == "AT":
                places &= self._places(partial(_is_at, str(value), self.text))
            elif name == "BRANCH":
                branches, places = places, 0
                for branch in value[1]:
                    places |= self.ends(branch, branches)
            elif name == "SUBPATTERN":
                places = self.ends(value[3], places)
            elif name.startswith("ASSERT"):
                found = self._asserted(value[0], value[1], places)
                places = found if name == "ASSERT" else places & ~found
            else:
                places = self._repeated(value[0], int(value[1]), value[2], places)
        return places

    def _repeated(self, least: int, most: int, nodes: Any, places: int) -> int:
        # After as many repetitions as there are places a set no longer changes.
        for _ in range(min(least, len(self.text) + 1)):
            places = self.ends(nodes, places)
        found = new = places
        for _ in range(min(most - least, len(self.text) + 1)):
            new = self.ends(nodes, new) & ~found
            if not new:
                break
            found |= new
        return found

    def _asserted(self, direction: int, nodes: Any, places: int) -> int:
        """Returns the places that matches begin at, or, with a direction of -1, end at."""
        width = nodes.getwidth()[0] if direction < 0 else 0  # a match has one width there
        found = 0
        for p in range(width, places.bit_length()):
            if places >> p & 1:
                ends = self.ends(nodes, 1 << (p - width))
                found |= (ends & 1 << p) if direction < 0 else (1 << p if ends else 0)
        return found

    def _of_characters(self, node: Any) -> int:
        """Returns the places before characters that a part names."""
        if id(node) not in self._occurrences:
            text, key = self.text, id(node)
            self._occurrences[key] = self._places(lambda p: p < len(text) and _has(node, text[p]))
        return self._occurrences[id(node)]

    def _places(self, is_one: Callable[[int], bool]) -> int:
        return sum(1 << p for p in range(len(self.text) + 1) if is_one(p))


def _operations(nodes: Any) -> Iterator[Any]:
    """Yields the operations of a pattern and of all its parts."""
    for operation, value in nodes:
        yield operation
        parts = (
            value[1] if str(operation) == "BRANCH" else value if isinstance(value, tuple) else ()
        )
        for part in parts:
            if isinstance(part, _parser.SubPattern):
                yield from _operations(part)
        if str(operation) == "SUBPATTERN" and (value[1] or value[2]):
            raise ValueError("flags are not supported")


def _has(node: Any, char: str) -> bool:
    """Returns whether a part of a pattern names a character."""
    name, value = str(node[0]), node[1]
    if name == "ANY":
        return char != "\n"
    if name == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    if name == "CATEGORY":
        kind = str(value).removeprefix("CATEGORY_")
        return _CATEGORIES[kind.removeprefix("NOT_")](char) != kind.startswith("NOT_")
    if name == "IN":
        is_negated = str(value[0][0]) == "NEGATE"
        return any(_has(each, char) for each in value[is_negated:]) != is_negated
    return bool(value == ord(char)) == (name == "LITERAL")


def _is_at(name: str, text: str, place: int) -> bool:
    """Returns whether an anchor such as `^` matches at a place."""
    if "BEGINNING" in name:
        return place == 0
    if "END" in name:
        return place == len(text) or (name == "AT_END" and text[place:] == "\n")
    around = (place > 0 and _CATEGORIES["WORD"](text[place - 1]),
              place < len(text) and _CATEGORIES["WORD"](text[place]))  # fmt: skip
    return (around[0] != around[1]) == (name == "AT_BOUNDARY")
