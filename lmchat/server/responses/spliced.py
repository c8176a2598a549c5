"""JSON of objects that contain lists of thousands of log-probabilities.

Encoding such a list takes up to half a second, in which no other request is served. So each entry
is encoded when its token arrives, and objects are encoded with a mark in place of the list.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

ENTRIES = f"entries-{secrets.token_hex(16)}"
"""Stands for the list in an object. No client can know it, so no text contains it."""

_MARK = f'"{ENTRIES}"'


def encoded(value: Any, entries: Sequence[str] = ()) -> str:
    """Returns the JSON of a value, as one line of ASCII.

    Args:
        value: the value.
        entries: JSON of the entries of the list that replaces `ENTRIES`.
    """
    return json.dumps(value).replace(_MARK, f"[{','.join(entries)}]")
