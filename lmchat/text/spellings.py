"""Spellings of marks, the tokens around turns: what looks like one, and where texts make one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_SPACE = "\u2581"  # a space in the pieces of SentencePiece models


def is_mark(text: str) -> bool:
    """Returns whether a text looks like a mark, such as "<|user|>" or "[INST]": it has letters or
    digits and other signs. Words, white space and "!" do not."""
    letters = [char.isalnum() for char in text if not char.isspace() and char != _SPACE]
    return any(letters) and not all(letters)


def pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    """Returns an expression that finds one of these texts, the longest first, as its group."""
    longest = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "(?!)()")


class Spellings:
    """The spellings of some tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        self.longest = max(map(len, self._texts), default=0)
        """Length of the longest one."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds one of them, the longest first."""
        return pattern(self._texts)

    def may_join(self, text: str) -> bool:
        """Returns whether a spelling may have a part in the text and the rest beside it."""
        sizes = range(1, min(self.longest, len(text) + 1))
        if any(text[:size] in self._ends or text[-size:] in self._begins for size in sizes):
            return True
        return 0 < len(text) < self.longest and any(text in spelling for spelling in self._texts)

    def span(self, before: str, after: str) -> bool:
        """Returns whether a spelling has a part at the end of `before`, and the rest of it is the
        start of `after`."""
        for size in range(1, min(self.longest, len(before) + 1)):
            begin = before[-size:]
            if begin in self._begins and any(
                text.startswith(begin) and after.startswith(text[size:]) for text in self._texts
            ):
                return True
        return False

    @functools.cached_property
    def _begins(self) -> frozenset[str]:
        return frozenset(text[:size] for text in self._texts for size in range(1, len(text)))

    @functools.cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[size:] for text in self._texts for size in range(1, len(text)))
