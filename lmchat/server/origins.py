"""Origins whose programs in a browser may use the server, as they are configured."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lmchat.errors import InvalidRequest
from turbomind.shown import shown

_ANY = ("*", "null")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([A-Za-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?")
_PORTS = {"http": ":80", "https": ":443"}  # which a browser leaves out


def parse_origins(texts: Iterable[str], has_keys: bool) -> frozenset[str]:
    """Returns origins as browsers write them.

    Args:
        texts: origins; "*" is any, "null" that of pages without one, such as files.
        has_keys: whether requests need an API key.

    Raises:
        InvalidRequest: one is malformed, or would let in every web page without a key.
    """
    return frozenset(_parsed(text, has_keys) for text in texts)


def _parsed(text: str, has_keys: bool) -> str:
    if text in _ANY:
        if has_keys:
            return text
        raise InvalidRequest(
            f"--allow-origin is {text!r}, which lets in pages of any site, and there is no API "
            "key: set $LMCHAT_API_KEY or --api-keys, or name an origin"
        )
    scheme, separator, host = text.partition("://")
    scheme = scheme.lower()
    if port := _PORTS.get(scheme):
        host = host.lower().removesuffix(port)
    origin = scheme + separator + host
    match = _ORIGIN.fullmatch(origin)
    if match is None or not 0 < int((match[2] or ":1")[1:]) < 1 << 16:
        raise InvalidRequest(
            f"--allow-origin is {shown(text)}, expected SCHEME://HOST or SCHEME://HOST:PORT "
            "without a path, such as https://notes.example, or *"
        )
    return origin
