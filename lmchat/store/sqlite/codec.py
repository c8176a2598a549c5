"""Values as bytes and back, equal in every part.

JSON in UTF-8, with what JSON lacks spelled as {"$": kind, "items": [...]}: mappings with other keys
than texts, and tuples. Lone surrogates stay as they are. Token ids are fixed-width integers.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmchat.store.words import separated

_TAG = "$"
_PLAIN = (str, int, float, type(None))
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_WIDTHS = {2: "H", 4: "I", 8: "Q"}
FIXED = 4
"""Bytes per token of `fixed()`."""


def dumps(value: object) -> bytes:
    """Returns the value as JSON.

    Raises TypeError for other types than JSON's, tuples and mappings, ValueError for a cycle.
    """
    try:
        text = _ENCODER.encode(_tagged(value))
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    return encode(text)


def loads(data: bytes) -> Any:
    """Parses the value. Raises ValueError for other bytes than `dumps()`'s."""
    try:
        if b'"$"' in data:
            return json.loads(decode(data), object_hook=_untagged)
        return json.loads(decode(data))
    except (RecursionError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"no value of ours: {error}") from None


def _tagged(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (dict, Mapping)):  # dict first: the check for Mapping is slow
        if _TAG in value or not all(isinstance(key, str) for key in value):
            items = [[_tagged(key), _tagged(item)] for key, item in value.items()]
            return {_TAG: "mapping", "items": items}
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_tagged(item) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot be stored, expected a JSON value")


def _untagged(found: dict[str, Any]) -> Any:
    kind = found.get(_TAG)
    if kind is None:
        return found
    if kind == "tuple":
        return tuple(found["items"])
    if kind == "mapping":
        return dict(found["items"])
    raise KeyError(kind)


def encode(text: str) -> bytes:
    """Returns a text as UTF-8, with lone surrogates encoded too."""
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> str:
    """Returns the text. Raises UnicodeDecodeError, a ValueError, for other bytes."""
    return data.decode("utf-8", "surrogatepass")


def column(text: str) -> str | bytes:
    """Returns the column value of a text: bytes where it has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return encode(text)
    return text


def words_column(text: str | bytes) -> str | bytes | None:
    """Returns the text with its words separated, for the full-text index.

    Returns None where that is the text itself, or where the text is damaged.
    """
    try:
        found = separated(decode(text) if isinstance(text, bytes) else text)
    except (ValueError, AttributeError):  # AttributeError: damage changed its type
        return None
    return None if found is None else column(found)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Returns token ids as one byte of width and the ids, little-endian.

    Raises ValueError for an id below 0 or of more than 64 bits.
    """
    ids = list(tokens)
    most = max(ids, default=0)
    width = 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    try:
        packed = array(_WIDTHS[width], ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids cannot be stored, expected 0 to 2^64 - 1: {error}") from None
    return bytes((width,)) + _little_endian(packed).tobytes()


def fixed(tokens: Sequence[int]) -> bytes:
    """Returns token ids of FIXED bytes each, to compare; ids above 2^32 - 2 compare equal."""
    try:
        packed = array(_WIDTHS[FIXED], tokens)
    except OverflowError:
        packed = array(_WIDTHS[FIXED], [min(token, (1 << 32) - 1) for token in tokens])
    return _little_endian(packed).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Returns the token ids. Raises ValueError for other bytes than `pack_tokens()`'s."""
    found = array(_WIDTHS[_width(data)])
    found.frombytes(data[1:])
    return tuple(_little_endian(found).tolist())


def token_count(data: bytes) -> int:
    """Returns the number of token ids. Raises ValueError for other bytes."""
    width = _width(data)
    if (len(data) - 1) % width:
        raise ValueError(
            f"the token ids have {len(data) - 1} bytes, expected a multiple of {width}"
        )
    return (len(data) - 1) // width


def _width(data: bytes) -> int:
    if not data or data[0] not in _WIDTHS:
        raise ValueError("the token ids have no width")
    return data[0]


def checksum(*values: object) -> int:
    """Returns the CRC-32 of column values: integers, None, texts or their bytes."""
    found = 0
    for value in values:
        data = encode(value) if isinstance(value, str) else value
        if isinstance(data, bytes):
            found = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), found))
        else:
            found = zlib.crc32(b"%a;" % (data,), found)
    return found


def seal(data: bytes, *place: object) -> bytes:
    """Returns the data after a checksum that holds for this place only."""
    return checksum(*place, data).to_bytes(4, "little") + data


def unseal(sealed: bytes, *place: object) -> bytes:
    """Returns the data. Raises ValueError where it was not sealed for this place."""
    data = sealed[4:]
    if sealed[:4] != checksum(*place, data).to_bytes(4, "little"):
        raise ValueError("its checksum is wrong")
    return data


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
