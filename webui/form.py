"""The fields of a session's form: what they show, and what they change."""

from __future__ import annotations

import json
from typing import Any

from lmchat.aio.engine import AsyncChatEngine
from lmchat.aio.session import AsyncSession
from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS
from lmchat.text.template_class import TemplateInfo

NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "seed",
    "stop_strings",
)  # fmt: skip
"""Generation settings with a field. Their values are JSON; an empty field is the model's own."""

CHOICES = {
    "overflow": ["drop", "refuse"],
    "history": ["append", "template"],
    "thinking": ["default", "on", "off"],
}
"""Fields with a choice of values."""

HELP = {
    "title": "empty: the start of the first message",
    "tags": "words, separated by commas",
    "pinned": "its KV cache is evicted last",
    "system": "instructions before the conversation",
    "overflow": "when the context is full: the oldest rounds drop out of the prompt, or refuse",
    "history": "how earlier turns are rendered: as they were, or by the template again",
    "thinking": "whether the model reasons before it answers",
    **{name: SETTINGS[name] for name in NUMBERS},
}
"""Every field, and what is written below it."""

NEW: dict[str, Any] = {
    **dict.fromkeys(HELP, ""), "pinned": False, "overflow": "drop", "history": "append",
    "thinking": "default",
}  # fmt: skip
"""Values of a new chat."""


async def values_of(engine: AsyncChatEngine, session: AsyncSession) -> dict[str, Any]:
    """Returns the values of the fields for a session."""
    switch, variables = engine.template_info.switch, session.template_variables
    thinking = "default"
    if switch is not None and switch.variable in variables:
        thinking = "on" if variables[switch.variable] == switch.on else "off"
    settings = session.settings
    return {
        "title": await session.title(),
        "tags": ", ".join(session.tags),
        "pinned": session.pinned,
        "system": await session.system() or "",
        "overflow": session.overflow,
        "history": session.history,
        "thinking": thinking,
        **{n: json.dumps(settings[n]) if n in settings else "" for n in NUMBERS},
    }


def changed(info: TemplateInfo, name: str, value: Any) -> dict[str, Any]:
    """Returns the properties of a session that another value of a field changes.

    Args:
        info: the model's chat template.
        name: the field.
        value: its value.

    Raises:
        InvalidRequest: the model cannot do that.
    """
    if name == "tags":
        return {"tags": [tag.strip() for tag in value.split(",") if tag.strip()]}
    if name == "thinking":
        switch = info.switch
        if switch is None:
            raise InvalidRequest("the model's chat template cannot switch reasoning on or off")
        given = {"on": switch.on, "off": switch.off}.get(value)
        return {"template_variables": {switch.variable: given}}
    return {"settings": {name: _parsed(name, value)}} if name in NUMBERS else {name: value}


def _parsed(name: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return [found] if name == "stop_strings" and isinstance(found, str) else found
