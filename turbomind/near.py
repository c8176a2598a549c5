"""Suggests a known name for one that was mistyped."""

from __future__ import annotations

from collections.abc import Iterable

LETTERS_PER_EDIT = 3
"""A suggestion differs from what was typed by at most one edit in this many letters."""

LEAST_START = 2
"""Letters that stand for a longer name that begins with them, at least."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `word` probably means, None if none is near.

    That is the only name that begins with `word`; else the one with the fewest edits, of a letter
    or of two neighbours that were swapped, up to one in LETTERS_PER_EDIT letters of `word`; else
    the first that begins with `word`.

    Args:
        word: What was typed; its case does not count.
        known: The names.
    """
    typed, names = word.lower(), list(known)
    most = len(typed) // LETTERS_PER_EDIT
    longer = [name for name in names if name.lower().startswith(typed)]
    longer = longer if len(typed) >= LEAST_START else []
    edits = [_edits(typed, name.lower(), most) for name in names]
    if edits and min(edits) <= most and len(longer) != 1:
        return names[edits.index(min(edits))]
    return longer[0] if longer else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the nearest known name, else all."""
    names = list(known)
    near = nearest(word, names)
    return f"; did you mean {near!r}?" if near else f", expected one of {', '.join(names)}"


def _edits(one: str, other: str, most: int) -> int:
    """Returns the optimal string alignment distance of two words; `most` + 1 if it is larger."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        oldest, before, row = before, row, [i]
        for j, opposite in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != opposite)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == opposite:
                row[j] = min(row[j], oldest[j - 2] + 1)
        if min(row) > most:
            return most + 1
    return row[-1]
