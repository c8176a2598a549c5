"""Strict JSON: no NaN, no repeated key, bounded numbers and nesting.

Not here: schemas (`schema`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from lmchat.errors import InvalidRequest

MAX_DEPTH = 64  # levels of lists and objects
_MAX_DIGITS = 40  # of a number; the longest we write has 24 characters
_SURROGATE = re.compile("[\ud800-\udfff]")


def dump(what: str, value: Any) -> bytes:
    """Returns the value as JSON in UTF-8; equal values give equal bytes.

    Keys keep their order, which templates see. A lone surrogate is written as an escape.
    Raises InvalidRequest for what `load()` would refuse.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}") from None
    _check_depth(what, value)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def load(what: str, data: bytes, *, floats: bool = True) -> Any:
    """Parses a JSON text in UTF-8.

    Args:
        what: name of the text in messages.
        data: the text.
        floats: whether it may hold numbers with a fraction or an exponent.

    Raises:
        InvalidRequest: the text is not JSON, repeats a key, or exceeds a limit of this module.
    """
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number if floats else _no_number,
            parse_constant=_constant,
        )
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply, expected {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from None
    _check_depth(what, value)
    return value


def plain(what: str, value: Any) -> Any:
    """Returns a copy made of JSON types. Raises InvalidRequest with the place of anything else."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) >= 10**_MAX_DIGITS:
            raise InvalidRequest(f"{what} is an integer of more than {_MAX_DIGITS} digits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(f"{what} is {value}, expected a finite number")
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(f"{what}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(f"{what}.{key}", item) for key, item in value.items()}
    raise InvalidRequest(f"{what} is a {type(value).__name__}, expected what JSON can hold")


def _check_depth(what: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, list | dict)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise InvalidRequest(f"{what} is nested too deeply, expected {MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated in one object")
    return found


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_MAX_DIGITS]} is out of range")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text[:_MAX_DIGITS]} stands where an integer is expected")


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")
