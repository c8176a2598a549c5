"""Splitting text into words for full-text search.

Scripts without spaces between words, and Korean, whose words have endings, are searched character
by character: each is a word, and a search matches a sequence of them. Elsewhere a word is a run of
letters and digits. Case is ignored everywhere, accents only in the latter.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

# Thai and Lao, Myanmar, Hangul, Khmer, kana and what stands among it, Bopomofo, Han.
_SINGLE = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3031-\u3035\u303b"
    "\u3041-\u318f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uaa60-\uaa7f"
    "\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_SINGLE}]|[^\W_{_SINGLE}]+")
_SEPARATOR = "\x1f"  # no text has it except by mistake
_is_single = re.compile(f"[{_SINGLE}]").fullmatch
_has_single = re.compile(f"[{_SINGLE}]").search
_has_marked = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\uaa60-\uaa7f]").search


class _Separate(dict[int, "str | int"]):
    """Table for `str.translate()` that puts separators around characters that are words.

    It is computed lazily, and is several times faster here than a regular expression.
    """

    def __missing__(self, code: int) -> str | int:
        made = f"{_SEPARATOR}{chr(code)}{_SEPARATOR}" if _is_single(chr(code)) else code
        self[code] = made
        return made


_SEPARATE = _Separate()


def separated(text: str) -> str | None:
    """Returns the text with separators around characters that are words, for an index whose words
    are runs of letters. Returns None if there are none."""
    if text.isascii() or not _has_single(text):
        return None
    return text.translate(_SEPARATE).replace(_SEPARATOR * 2, _SEPARATOR)


def may_have_marks(text: str) -> bool:
    """Returns whether the text has a script with signs for vowels and tones. An index ignores these
    signs, so its matches need a check."""
    return _has_marked(text) is not None


def is_separated(text: str) -> bool:
    """Returns whether the text has a separator."""
    return _SEPARATOR in text


def joined(text: str) -> str:
    """Returns the text without the separators."""
    return text.replace(_SEPARATOR, "")


@dataclass(frozen=True)
class Word:
    """A word in its compared form, and its position."""

    folded: str
    start: int
    end: int


def words(text: str) -> list[Word]:
    """Yields the words in order."""
    return [Word(_folded(m.group()), m.start(), m.end()) for m in _WORD.finditer(text)]


def _folded(word: str) -> str:
    if _is_single(word):
        return word
    parts = unicodedata.normalize("NFKD", word.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))


def matches(text: str, search: str) -> bool:
    """Returns whether a text has all words of a search.

    Words are separated by spaces; a word that ends with `*` is a prefix. A search without words
    matches no text.
    """
    there = words(text)
    wanted = [each for each in search.split() if words(each)]
    return bool(wanted) and all(_spans(there, each) for each in wanted)


def marks(text: str, search: str) -> list[tuple[int, int]]:
    """Returns the positions of words of a search in a text: (start, end), ascending."""
    there = words(text)
    return sorted(span for each in search.split() for span in _spans(there, each))


def _spans(there: list[Word], each: str) -> list[tuple[int, int]]:
    wanted = [word.folded for word in words(each)]
    if not wanted:
        return []
    found, last = [], len(wanted) - 1
    for at in range(len(there) - last):
        row = [word.folded for word in there[at : at + last + 1]]
        begins = each.endswith("*") and row[last].startswith(wanted[last])
        if row[:last] == wanted[:last] and (begins or row[last] == wanted[last]):
            found.append((there[at].start, there[at + last].end))
    return found
