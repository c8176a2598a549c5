"""Small texts: cleaned, counted, shortened, and units of bytes and time."""

from __future__ import annotations

import re

EXCERPT = 50  # characters of a text in a list
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]+")  # C0 but for tab and newline, and C1


def clean(text: str) -> str:
    """Removes control characters except tab and newline, so that text cannot move the cursor."""
    return CONTROL.sub("", text)


def counted(count: int, what: str) -> str:
    """Returns `1 token`, `2 tokens`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def excerpt(text: str) -> str:
    """Returns the first EXCERPT characters of a text, in one line."""
    words = " ".join(clean(text).split())
    return words if len(words) <= EXCERPT else words[: EXCERPT - 1] + "…"


def human_bytes(count: float) -> str:
    """Returns a size with its unit: 1536 gives "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
