"""Parses and formats generation settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS
from turbomind.params import refuse_unknown

if TYPE_CHECKING:
    import lmchat

DEFAULT = "default"
_WORDS = {DEFAULT: None, "on": True, "off": False}


def explanation(name: str) -> str:
    """Returns the explanation of a setting. Raises InvalidRequest for an unknown name."""
    refuse_unknown("setting", (name,), SETTINGS)
    return SETTINGS[name]


def parse_value(text: str) -> Any:
    """Returns the value that a text stands for.

    Args:
        text: "on", "off", "default" (gives None), JSON, or else a plain text.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Parses NAME=VALUE texts.

    Raises:
        InvalidRequest: A text has another form, or a name is unknown or given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InvalidRequest(f"--set is {pair!r}, expected NAME=VALUE")
        explanation(name)  # rejects unknown names
        if name in found:
            raise InvalidRequest(f"--set {name} is given twice, expected once")
        found[name] = parse_value(value)
    return found


def thinking_variables(engine: lmchat.EngineApi, on: bool) -> dict[str, Any]:
    """Returns the template variables that switch reasoning on or off.

    Raises:
        InvalidRequest: The template has no such switch.
    """
    switch = engine.template_info.switch
    if switch is None:
        raise InvalidRequest("the model's chat template cannot switch reasoning on or off")
    return {switch.variable: switch.on if on else switch.off}


def in_effect(session: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns name -> (value, origin) of the settings that differ from the engine's defaults.

    Args:
        session: Settings of the session.
        model: Settings of the model.
    """
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
