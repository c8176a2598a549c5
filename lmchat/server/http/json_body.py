"""Parsing of JSON bodies, in a time that is bounded by their number of values.

Parsing holds the interpreter's lock: 8 MiB of one long text take some milliseconds, but the same
size in small values takes up to half a second, in which no other request is served. So a body that
may have too many values is counted first, in another thread.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from lmchat.aio.threads import shared
from lmchat.server.errors import HttpError

MAX_VALUES = 300_000
"""Most values in one body. Prompts of token ids are lists of that many numbers."""

_SEPARATORS = (b",", b"[", b"{")
_QUOTE, _BACKSLASH = b'"', 0x5C


async def parsed(body: bytes, most: int = MAX_VALUES) -> Any:
    """Returns the value of a JSON body, without NaN and infinities.

    Raises:
        HttpError: it is not JSON, or has more than `most` values.
    """
    if sum(body.count(one) for one in _SEPARATORS) > most:
        found = await shared.run(values, body, most)
        if found > most:
            raise HttpError(413, f"the body has more than {most} values", code="too_many_values")
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, "the body is not valid JSON", code="invalid_json") from error


def values(body: bytes, most: int) -> int:
    """Returns an upper bound of the number of values in JSON, exact up to `most`.

    It counts what separates values, outside of texts.
    """
    count, at = 1, 0
    while count <= most:
        begin = body.find(_QUOTE, at)
        end = len(body) if begin < 0 else begin
        count += sum(body.count(one, at, end) for one in _SEPARATORS)
        if begin < 0:
            break
        at = _end_of_text(body, begin + 1)
    return count


def _end_of_text(body: bytes, at: int) -> int:
    """Returns the place after the text that begins at `at`."""
    while (at := body.find(_QUOTE, at)) >= 0:
        first = at
        while body[first - 1] == _BACKSLASH:
            first -= 1
        at += 1
        if (at - 1 - first) % 2 == 0:  # the quote is not escaped
            return at
    return len(body)
