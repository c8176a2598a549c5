"""Readers of config.json and generation_config.json that ignore no field silently.

Not here: which fields the reference implementations read (`reference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from turbomind.errors import ModelError
from turbomind.models.reference import fields_without_effect

_MISSING = object()


class Fields:
    """A JSON object whose fields are read one by one; `finish()` judges those that were not read.

    Args:
        values: The object.
        where: Its name in messages.
        ignored: The list to which `finish()` adds the names of fields without a meaning.

    Getters raise ModelError with the field, its value and the expected value. A null counts as
    absent. `default` replaces an absent field; without a default the field is required.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        ignored: list[str] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.ignored: list[str] = [] if ignored is None else ignored
        self._taken: set[str] = set()

    def error(self, name: str, expected: str) -> ModelError:
        """Returns the ModelError of a field with a wrong value."""
        seen = repr(self.values[name]) if name in self.values else "absent"
        if len(seen) > 200:
            seen = seen[:200] + "..."
        return ModelError(f"{self.where}: {name} is {seen}, expected {expected}")

    def has(self, name: str) -> bool:
        """Returns whether the object has the field, even as null."""
        return name in self.values

    def _take(self, name: str, default: Any, expected: str) -> Any:
        self._taken.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(name, expected)
        return default

    def raw(self, name: str, default: Any = None) -> Any:
        """Returns the unchecked value."""
        return self._take(name, default, "a value")

    def integer(self, name: str, low: int, high: int, default: Any = _MISSING) -> Any:
        """Returns an int in [low, high], or the default."""
        expected = f"an integer from {low} to {high}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, expected)
        return value

    def number(self, name: str, low: float, high: float, default: Any = _MISSING) -> Any:
        """Returns a finite float in [low, high], or the default."""
        expected = f"a number from {low:g} to {high:g}"
        value = self._take(name, default, expected)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, expected)
        if not math.isfinite(value) or not low <= value <= high:
            raise self.error(name, expected)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false, or the default."""
        value = self._take(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, options: tuple[str, ...], default: Any = _MISSING) -> str:
        """Returns one of the strings, or the default."""
        expected = " or ".join(repr(o) for o in options)
        value = self._take(name, default, expected)
        if value not in options:
            raise self.error(name, expected)
        return str(value)

    def finish(self, reads: Mapping[str, Any], prefix: str = "") -> None:
        """Refuses fields that the reference reads, that were not read here, and that have another
        value than its default. Adds those that it does not read to `ignored`.

        Args:
            reads: The fields that the reference reads, with their defaults.
            prefix: What comes before the names in `ignored`.

        Raises:
            ModelError: A field is refused.
        """
        for name, value in self._others():
            if name not in reads:
                if name not in fields_without_effect():
                    self.ignored.append(prefix + name)
            elif not _is_equal(value, reads[name]):
                raise self.unsupported(name, reads[name])

    def refuse_others(self) -> None:
        """Refuses all fields that were not read; raises ModelError."""
        for name, _ in self._others():
            raise self.unsupported(name, None)

    def _others(self) -> list[tuple[str, Any]]:
        """Returns the fields that were not read and are not null."""
        others = ((name, value) for name, value in self.values.items() if value is not None)
        return [(name, value) for name, value in others if name not in self._taken]

    def unsupported(self, name: str, default: Any) -> ModelError:
        """Returns the ModelError of a field of which only one value is supported."""
        reason = "nothing: this field is not supported"
        return self.error(name, reason if default is None else f"{default!r} or nothing")


def _is_equal(value: Any, default: Any) -> bool:
    """Returns whether a value is the default. True is not 1, but false means as much as null."""
    if isinstance(value, bool) != isinstance(default, bool):
        return value is False and default is None
    return bool(value == default)


def token_id_list(values: Mapping[str, Any], name: str, where: str) -> list[int]:
    """Returns the ids of a field that is a token id, a list of them, or absent (then empty)."""
    value = values.get(name)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(f"{where}: {name} is {value!r}, expected a token id or a list of them")
    return ids
