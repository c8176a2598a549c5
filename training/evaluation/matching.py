"""Checks of replies: whether one contains a value, repeats itself, or is valid text."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

# A reply loops if a sequence of this many words occurs this many times,
_SEQUENCE, _SEQUENCES = 4, 3
# or a sentence of at least this many words occurs twice in a row,
_SENTENCE = 3
# or up to 8 characters, not all of them spaces, occur 8 times in a row.
_RUN = re.compile(r"(.{1,8}?)\1{7,}", re.DOTALL)
_OWN = re.compile(r"\b(?:my|our)\b")
# Months that are verbs in lower case.
_VERBS = re.compile(r"\b(?:may|march)\b")

LOOP = (
    f"the same {_SEQUENCE} words {_SEQUENCES} times or more, "
    f"the same sentence of {_SENTENCE} words or more twice in a row, "
    "or up to 8 characters 8 times in a row"
)
"""Definition of a loop, for reports."""


def contains(reply: str, value: str) -> bool:
    """Returns whether `value` is in `reply` as separate words, ignoring case.

    A number does not match inside a longer number, amount, time or code: 5 is not in 15, 5.20,
    5:30, -5 or B-5. The user's "my desk" may be "your desk" in the reply. The months May and March
    match with a capital only.
    """
    if value in ("May", "March"):
        reply = _VERBS.sub("", reply)
    return _pattern(_plain(value)).search(_plain(reply)) is not None


def _plain(text: str) -> str:
    return _OWN.sub("your", " ".join(text.casefold().split()))


def remembers(reply: str, value: str, stale: Iterable[str] = ()) -> bool:
    """Returns whether `reply` has `value` and none of the values that it replaced."""
    return contains(reply, value) and not any(contains(reply, old) for old in stale)


@cache
def _pattern(value: str) -> re.Pattern[str]:
    before, after = r"(?<!\w)", r"(?!\w)"
    if value[:1].isdigit():
        before += r"(?<!\d[.,:/])(?<!-)"
    if value[-1:].isdigit():
        after += r"(?![.,:/]\d)(?!-\w)"
    return re.compile(before + re.escape(value) + after)


def loops(text: str) -> bool:
    """Returns whether `text` loops, see LOOP."""
    words = _words(text)
    sequences = Counter(zip(*(words[at:] for at in range(_SEQUENCE)), strict=False))
    if any(count >= _SEQUENCES for count in sequences.values()):
        return True
    sentences = [said for part in re.split(r"[.!?\n]+", text) if (said := _words(part))]
    pairs = itertools.pairwise(sentences)
    if any(one == two and len(one) >= _SENTENCE for one, two in pairs):
        return True
    return any(found[1].strip() for found in _RUN.finditer(text))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:'\w+)*", text.casefold())


def is_text(reply: str) -> bool:
    """Returns whether `reply` has visible characters, and no U+FFFD, surrogate or control character
    except line feed and tab."""
    wrong = (unicodedata.category(c) in ("Cc", "Cs", "Cn") and c not in "\n\t" for c in reply)
    return bool(reply.strip()) and "\ufffd" not in reply and not any(wrong)
