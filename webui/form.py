"""The fields of a session's form: what they show, and what they change."""

from __future__ import annotations

import json
from typing import Any

from lmchat.engine import ChatEngine
from lmchat.errors import InvalidRequest
from lmchat.generation.settings import SETTINGS
from lmchat.sessions.session import Session

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


def values_of(engine: ChatEngine, session: Session) -> dict[str, Any]:
    """Returns the values of the fields for a session. It may read the store."""
    switch, variables = engine.template_info.switch, session.template_variables
    thinking = "default"
    if switch is not None and switch.variable in variables:
        thinking = "on" if variables[switch.variable] == switch.on else "off"
    settings = session.settings
    return {
        **{name: getattr(session, name) for name in ("title", "pinned", "overflow", "history")},
        "tags": ", ".join(session.tags),
        "system": session.system or "",
        "thinking": thinking,
        **{n: json.dumps(settings[n]) if n in settings else "" for n in NUMBERS},
    }


def change(engine: ChatEngine, session: Session, name: str, value: Any) -> None:
    """Gives a field of a session another value.

    Raises:
        Error: the session refuses it.
    """
    if name == "tags":
        session.set_tags([tag.strip() for tag in value.split(",") if tag.strip()])
    elif name == "pinned":
        session.pin(value)
    elif name == "system":
        session.set_system(value or None)
    elif name == "thinking":
        switch = engine.template_info.switch
        if switch is None:
            raise InvalidRequest("the model's chat template cannot switch reasoning on or off")
        given = {"on": switch.on, "off": switch.off}.get(value)
        session.set_variables(**{switch.variable: given})
    elif name in NUMBERS:
        session.update(settings={name: _parsed(name, value)})
    else:
        session.update(**{name: value})


def _parsed(name: str, text: str) -> Any:
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return [found] if name == "stop_strings" and isinstance(found, str) else found
