"""As much of JSON Schema (draft 2020-12) as `session.schema.json` uses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from lmchat.archive import json_text
from lmchat.errors import InvalidRequest

_SHOWN = 60  # characters of a wrong value in a message
_TEXTS = {"$schema", "title", "description", "$defs"}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


class Schema:
    """Checks values. A keyword that it does not know is an error at once, not ignored."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._check_keywords(root)

    def check(self, value: Any) -> None:
        """InvalidRequest names the place of the first thing that is wrong in `value`."""
        self._check(value, self._root, "")

    def _check(self, value: Any, schema: dict[str, Any], where: str) -> None:
        if "$ref" in schema:
            self._check(value, self._root["$defs"][schema["$ref"].rpartition("/")[2]], where)
        _check_value(value, schema, where)
        if isinstance(value, dict):
            self._check_object(value, schema, where)
        elif isinstance(value, list):
            self._check_list(value, schema, where)

    def _check_object(self, value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        properties = schema.get("properties", {})
        more = schema.get("additionalProperties", True)
        for name in schema.get("required", ()):
            if name not in value:
                raise InvalidRequest(f"{_join(where, name)} is missing")
        if len(value) > schema.get("maxProperties", len(value)):
            raise _too_many(where, len(value), schema["maxProperties"])
        for name, item in value.items():
            if name in properties:
                self._check(item, properties[name], _join(where, name))
            elif more is False:
                raise InvalidRequest(
                    f"{where or 'it'} has {_short(name)!r}, expected only {', '.join(properties)}"
                )
            elif isinstance(more, dict):
                self._check(item, more, _join(where, name))

    def _check_list(self, value: list[Any], schema: dict[str, Any], where: str) -> None:
        if len(value) > schema.get("maxItems", len(value)):
            raise _too_many(where, len(value), schema["maxItems"])
        items = schema.get("items")
        if items is None or _integers_in_range(value, items):
            return
        for i, item in enumerate(value):
            self._check(item, items, f"{where}[{i}]")

    def _check_keywords(self, schema: dict[str, Any]) -> None:
        unknown = set(schema) - _KEYWORDS
        if unknown:
            raise InvalidRequest(f"schema has {sorted(unknown)}, expected {sorted(_KEYWORDS)}")
        below = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
        below += [schema[name] for name in ("items", "additionalProperties") if name in schema]
        for each in below:
            if isinstance(each, dict):
                self._check_keywords(each)


_KEYWORDS = _TEXTS | {
    "$ref", "type", "properties", "required", "additionalProperties", "items", "enum", "const",
    "minimum", "maximum", "minLength", "maxLength", "pattern", "maxItems", "maxProperties",
}  # fmt: skip


@functools.cache
def session_schema() -> Schema:
    """Of `session.json`."""
    data = files("lmchat.archive").joinpath("session.schema.json").read_bytes()
    return Schema(json_text.load("session.schema.json", data))


def _check_value(value: Any, schema: dict[str, Any], where: str) -> None:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        raise _wrong(where, value, " or ".join(types))
    if "const" in schema and not _same(value, schema["const"]):
        raise _wrong(where, value, repr(schema["const"]))
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        raise _wrong(where, value, "one of " + ", ".join(map(repr, schema["enum"])))
    if isinstance(value, str):
        _check_text(value, schema, where)
    elif _TYPES["number"](value):
        if "minimum" in schema and value < schema["minimum"]:
            raise _wrong(where, value, f"at least {schema['minimum']}")
        if "maximum" in schema and value > schema["maximum"]:
            raise _wrong(where, value, f"at most {schema['maximum']}")


def _check_text(value: str, schema: dict[str, Any], where: str) -> None:
    if len(value) < schema.get("minLength", 0):
        raise _wrong(where, value, f"at least {schema['minLength']} characters")
    if len(value) > schema.get("maxLength", len(value)):
        raise _wrong(where, value, f"at most {schema['maxLength']} characters")
    # `$` of Python would also match before a line end.
    if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
        raise _wrong(where, value, f"a text like {schema['pattern']}")


def _integers_in_range(value: list[Any], items: dict[str, Any]) -> bool:
    """The quick way through long lists of token ids; False: look at each."""
    if items.keys() != {"type", "minimum", "maximum"} or items["type"] != "integer":
        return False
    if not value:
        return True
    return set(map(type, value)) == {int} and bool(
        items["minimum"] <= min(value) and max(value) <= items["maximum"]
    )


def _same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and bool(value == expected)  # True is not 1 here


def _join(where: str, name: str) -> str:
    return f"{where}.{_short(name)}" if where else _short(name)


def _wrong(where: str, value: Any, expected: str) -> InvalidRequest:
    if isinstance(value, dict | list):
        seen = "an object" if isinstance(value, dict) else "a list"
    else:
        seen = _short(repr(value))
    return InvalidRequest(f"{where or 'it'} is {seen}, expected {expected}")


def _too_many(where: str, count: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"{where or 'it'} has {count} entries, expected at most {most}")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
