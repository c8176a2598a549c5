"""JSON answers of any size, encoded without holding up other requests.

`json.dumps` holds the interpreter's lock: 13 MB of log-probabilities take 0.4 s, in which no other
thread runs. So answers that may be large are encoded in another thread and in pieces, between
which other threads run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse

from lmchat.aio.threads import shared

_DEPTH = 4  # objects and lists below are encoded whole
_NUMBERS = 4096  # of a list in one piece


class Json(JSONResponse):
    """A JSON response that is encoded in pieces. It is made in another thread than the loop's."""

    def render(self, content: Any) -> bytes:
        """Returns the JSON of a value."""
        return encoded(content)


async def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Json:
    """Returns the response with the JSON of a value, which is encoded in another thread."""
    return await shared.run(Json, value, status, headers)


def encoded(value: Any, *, ascii_only: bool = False) -> bytes:
    """Returns the JSON of a value, in pieces and without spaces.

    Args:
        value: the value. It has no NaN and no infinities.
        ascii_only: whether other characters are escaped. The JSON is one line then.
    """
    encoder = json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))
    return "".join(_pieces(value, _DEPTH, encoder)).encode()


def _pieces(value: Any, depth: int, encoder: json.JSONEncoder) -> Iterator[str]:
    if isinstance(value, dict) and depth and value and all(isinstance(key, str) for key in value):
        opening = "{"
        for name, one in value.items():
            yield f"{opening}{encoder.encode(name)}:"
            yield from _pieces(one, depth - 1, encoder)
            opening = ","
        yield "}"
    elif isinstance(value, list) and depth and value and isinstance(value[0], dict | list):
        opening = "["
        for one in value:
            yield opening
            yield from _pieces(one, depth - 1, encoder)
            opening = ","
        yield "]"
    elif isinstance(value, list) and len(value) > _NUMBERS:
        parts = (value[at : at + _NUMBERS] for at in range(0, len(value), _NUMBERS))
        yield "[" + ",".join(encoder.encode(part)[1:-1] for part in parts) + "]"
    else:
        yield encoder.encode(value)
