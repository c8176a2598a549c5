"""Paths and names as users type or paste them after a command: with spaces, quoted, escaped."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

_QUOTES = "\"'"


def path_of(typed: str) -> str:
    """Returns the path that the user means; a name that has quotes comes before quoted names."""
    path = os.path.expanduser(typed)
    if os.path.lexists(path):
        return path
    word = _single_word(typed)
    return path if word is None else os.path.expanduser(word)


def name_of(typed: str) -> str:
    """Returns the name that the user means: what is between quotes, or else the whole text."""
    is_quoted = len(typed) > 1 and typed[0] in _QUOTES and typed[0] == typed[-1]
    word = _single_word(typed) if is_quoted else None
    return typed if word is None else word


def path_and_name(typed: str) -> tuple[str, str | None]:
    """Returns the path and the name after it, None without one; both may have spaces.

    The path is the longest that exists. If none does, it is the text, or all but its last word.
    """
    for path, name in _splits(typed):
        if os.path.exists(path_of(path)):
            return path_of(path), name_of(name) or None
    path, _, name = typed.rpartition(" ")
    return (path_of(path), name) if path and _single_word(typed) is None else (path_of(typed), None)


def _splits(typed: str) -> Iterator[tuple[str, str]]:
    """Yields the text and "", then what is before and after each space, from the right."""
    yield typed, ""
    for at in range(len(typed) - 1, 0, -1):
        if typed[at] == " ":
            yield typed[:at].rstrip(), typed[at + 1 :].strip()


def _single_word(typed: str) -> str | None:
    """Returns the word that a shell reads; None if it reads another number of words."""
    try:
        words = shlex.split(typed)
    except ValueError:  # an open quote
        return None
    return words[0] if len(words) == 1 else None
