"""Lists of modules in a quantization_config: names, classes, and patterns that begin with `re:`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turbomind.errors import ModelError
from turbomind.models.config import Fields
from turbomind.quant.look_around import LookAround

_PATTERN = "re:"
_MAX_PATTERNS = 100

Matcher = Callable[[Any], bool]


class Patterns:
    """The patterns of a quantization_config.

    They are matched by Rust's regex in pydantic_core, in linear time and at most 10 MiB each, since
    a pattern of a checkpoint could occupy Python's `re` forever. It has no look-around, for which
    there is a slower matcher, and no backreferences.
    """

    def __init__(self) -> None:
        self._matchers: dict[str, Matcher] = {}

    def matcher(self, target: str, where: str) -> Matcher:
        """Returns what matches names with a pattern.

        Args:
            target: The pattern, from `re:` on.
            where: The field, for messages.

        Raises:
            ModelError: The pattern cannot be read, or there are too many.
        """
        if target not in self._matchers:
            if len(self._matchers) == _MAX_PATTERNS:
                raise ModelError(f"{where} has too many patterns, expected {_MAX_PATTERNS} in all")
            self._matchers[target] = _compile(target, where)
        return self._matchers[target]


class Targets:
    """A list such as `targets` or `ignore`.

    Args:
        fields: The object that has the list.
        name: The field. Absent or null: no modules.
        patterns: The patterns of the config.

    Raises:
        ModelError: The field is not a list of strings, or a pattern cannot be read.
    """

    def __init__(self, fields: Fields, name: str, patterns: Patterns) -> None:
        listed = fields.raw(name, [])
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise fields.error(name, "a list of strings")
        self._names = {each for each in listed if not each.startswith(_PATTERN)}
        self._patterns = [
            (each, patterns.matcher(each, f"{fields.where}: {name}"))
            for each in sorted(listed)
            if each.startswith(_PATTERN)
        ]

    def rank(self, module: str, kind: str) -> tuple[int, str] | None:
        """Returns how closely a module is named, the closest first; None where it is not.

        Args:
            module: The name of the module.
            kind: The name of its class in torch.
        """
        if module in self._names:
            return 0, module
        for pattern, matches in self._patterns:
            if matches(module):
                return 1, pattern
        return (2, kind) if kind in self._names else None


def _compile(target: str, where: str) -> Matcher:
    # Imported here: few models have patterns.
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    # The format's library matches from the start of a name, not to its end.
    pattern = rf"\A(?:{target.removeprefix(_PATTERN)})"
    try:
        schema = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        reason = str(error).splitlines()[-1].removeprefix("error: ").strip()
        if "look-around" in reason:
            try:
                return LookAround(target.removeprefix(_PATTERN))
            except ValueError as other:
                reason = str(other)
        raise ModelError(
            f"{where} has the pattern {target[:200]!r}, expected one without backreferences "
            f"({reason})"
        ) from error
