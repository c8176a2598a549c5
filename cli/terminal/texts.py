"""Small texts: counts, and the beginnings of longer ones."""

from __future__ import annotations

from ..chat.status import clean

EXCERPT = 50  # characters of a text in a list


def counted(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def excerpt(text: str) -> str:
    """The beginning of a text, in one line."""
    words = " ".join(clean(text).split())
    return words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"
