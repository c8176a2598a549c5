"""Bounds on settings and texts of requests, for every dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lmchat.server.config import Limits
from lmchat.server.errors import HttpError, bounded
from lmchat.text.scene import texts
from turbomind.shown import shown

MAX_VARIABLES = 1024
"""Most values of template variables, at any depth. A template may walk through all of them."""
MAX_VARIABLE_BYTES = 64 << 10
"""Most bytes of text in template variables. They are part of the keys of caches."""
MEAN_PARTS = 4
"""Mean number of parts of which the content of a message may consist."""

_LISTS = ("logit_bias", "bad_words", "stop_token_ids", "eos_token_ids")
_SAME: Mapping[str, str] = MappingProxyType({})


def check_limits(
    settings: Mapping[str, Any], limits: Limits, fields: Mapping[str, str] = _SAME
) -> None:
    """Refuses settings of a generation above the server's bounds.

    Args:
        settings: the settings that the engine gets. It refuses values of wrong types itself.
        limits: the bounds.
        fields: the request's names of settings that it names otherwise.

    Raises:
        HttpError: names the field.
    """

    def refuse(name: str, seen: str, most: int, what: str = "", at: str = "") -> None:
        field = fields.get(name, name) + at
        text = f"{field} is {bounded(seen, 100)}, expected at most {most}{what}"
        raise HttpError(400, text, param=field)

    for name, most in (("n", limits.choices), ("logprobs", limits.top_logprobs)):
        value = settings.get(name)
        if isinstance(value, int) and value > most:
            refuse(name, shown(value), most)
    least, longest = settings.get("min_new_tokens"), settings.get("max_new_tokens")
    if isinstance(least, int) and isinstance(longest, int) and least > longest:
        refuse("min_new_tokens", shown(least), longest, ", the most tokens to generate")
    for name in _LISTS:
        value = settings.get(name)
        if isinstance(value, list | dict) and len(value) > limits.logit_bias:
            refuse(name, f"{len(value)} entries", limits.logit_bias)
    stops = settings.get("stop_strings")
    if isinstance(stops, list | tuple) and len(stops) > limits.stop_strings:
        refuse("stop_strings", f"{len(stops)} stop strings", limits.stop_strings)
    alone = isinstance(stops, str)
    for i, stop in enumerate([stops] if alone else _listed(stops)):
        if isinstance(stop, str) and _size(stop) > limits.stop_bytes:
            at = "" if alone else f"[{i}]"
            refuse("stop_strings", shown(stop), limits.stop_bytes, " bytes", at)


def check_variables(variables: Mapping[str, Any] | None, field: str = "template_variables") -> None:
    """Refuses template variables with too many values or too much text.

    Args:
        variables: the variables.
        field: name of the request's field, for errors.

    Raises:
        HttpError: there are too many.
    """
    found = dict(variables or {})
    size = sum(_size(text) for text in texts([found]))
    if _values(found, MAX_VARIABLES) > MAX_VARIABLES:
        seen, most = f"more than {MAX_VARIABLES} values", f"at most {MAX_VARIABLES}"
    elif size > MAX_VARIABLE_BYTES:
        seen, most = f"{size} bytes of text", f"at most {MAX_VARIABLE_BYTES}"
    else:
        return
    raise HttpError(400, f"{field} is {seen}, expected {most}", param=field)


def check_counted(limits: Limits, *values: Any) -> None:
    """Refuses values with too much text for a route that only returns or counts its tokens. A
    generation refuses what the context cannot hold."""
    size = sum(map(_size, texts(values)))
    if size > limits.counted:
        raise HttpError(
            413,
            f"the text has {size} bytes, expected at most {limits.counted}",
            code="text_too_large",
        )


class Parts:
    """Counts the parts of the messages of one request.

    Args:
        messages: number of messages that a request may have.
    """

    def __init__(self, messages: int) -> None:
        self._most = messages * MEAN_PARTS
        self._count = 0

    def add(self, parts: Sequence[Any], field: str) -> None:
        """Counts the parts of one message.

        Raises:
            HttpError: the request has too many with them; `field` is their name.
        """
        self._count += len(parts)
        if self._count > self._most:
            raise HttpError(
                400,
                f"{field} has too many parts, expected at most {self._most} in all messages",
                param=field,
            )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _values(value: Any, most: int) -> int:
    """Returns the number of values at any depth, counted up to a bit above `most`."""
    rest, count = [value], 0
    while rest and count <= most:
        one = rest.pop()
        count += 1
        if isinstance(one, dict | list):
            if len(one) > most:
                return most + 1
            rest += one.values() if isinstance(one, dict) else one
    return count
