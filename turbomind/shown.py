"""Values in messages: short, whatever their size."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

MOST = 120
"""Longest text of a value in a message, in characters."""

_ITEMS = 6  # of a list or a mapping
_MOST_BITS = 256  # of an integer: more would take long to convert, or be refused by Python


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = MOST - 20
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = _ITEMS

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MOST_BITS else f"an integer of {bits} bits"

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        # In the order given; the base class would sort all keys of a large mapping.
        items = [
            f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" if level > 0 else "..."
            for k, v in islice(x.items(), _ITEMS)
        ]
        return "{" + ", ".join([*items, "..."] if len(x) > _ITEMS else items) + "}"

    def repr_set(self, x: set[Any], level: int) -> str:
        items = [self.repr1(i, level - 1) if level > 0 else "..." for i in islice(x, _ITEMS)]
        return (
            "{" + ", ".join([*items, "..."] if len(x) > _ITEMS else items) + "}" if x else "set()"
        )


_short = _Short()


def shown(value: object) -> str:
    """Returns `repr(value)`, cut to MOST characters. A large value is not converted as a whole."""
    return cut(_short.repr(value))


def cut(text: str, most: int = MOST) -> str:
    """Returns the text, cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def printable(text: str) -> str:
    """Returns the text with escapes in place of characters that a terminal does not print.

    A name from a file may hold escape sequences, which move a terminal's cursor or set its title.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_name(name: str) -> str:
    """Returns a name from a file for a message: printable, and cut to MOST characters."""
    return printable(cut(name))
