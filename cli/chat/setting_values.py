"""Settings as a person types and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS

if TYPE_CHECKING:
    import lmchat

DEFAULT = "default"
_WORDS = {DEFAULT: None, "on": True, "off": False}


def explanation(name: str) -> str:
    """What a setting does; InvalidRequest for a name that is none."""
    if name not in SETTINGS:
        raise InvalidRequest(f"setting is {name!r}, expected one of {', '.join(SETTINGS)}")
    return SETTINGS[name]


def parse_value(text: str) -> Any:
    """on, off, JSON where it is, else the text itself; None for "default"."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """The values of NAME=VALUE texts; InvalidRequest for other texts and for names given twice."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--set is {pair!r}, expected NAME=VALUE")
        explanation(name)  # refuses a name that is none
        if name in found:
            raise InvalidRequest(f"--set {name} is given twice, expected once")
        found[name] = parse_value(value)
    return found


def thinking_variables(engine: lmchat.ChatEngine, on: bool) -> dict[str, Any]:
    """The template variables that turn reasoning on or off; InvalidRequest where none does."""
    switch = engine.template_info.switch
    if switch is None:
        raise InvalidRequest("the model's chat template cannot switch reasoning on or off")
    return {switch.variable: switch.on if on else switch.off}


def in_effect(session: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name -> (value, whose it is) of the settings that differ from the engine's own."""
    values = {**model, **session}
    return {
        name: (_spell(values[name]), "this session's" if name in session else "the model's")
        for name in SETTINGS
        if name in values
    }


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return json.dumps(value, ensure_ascii=False)
