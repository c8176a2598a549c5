"""Small texts: cleaned, counted, shortened, and units of bytes and time."""

from __future__ import annotations

import re

EXCERPT = 50  # characters of a text in a list
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Removes control characters except tab and newline, so that text cannot move the cursor."""
    return _CONTROL.sub("", text)


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


def latency(seconds: float) -> str:
    """Returns a time to first token: milliseconds below a second, seconds above."""
    milliseconds = round(1000 * seconds)
    if milliseconds >= 1000:
        return f"{seconds:.2f} s"
    return f"{milliseconds} ms" if milliseconds else "<1 ms"


def duration(seconds: float) -> str:
    """Returns a duration in at most two units, such as `2 min 5 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
