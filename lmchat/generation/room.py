"""The room that a prompt leaves for its reply in the context."""

from __future__ import annotations

from dataclasses import replace

from lmchat.errors import ContextFull, context_full
from lmchat.generation.settings import Effective
from turbomind.params import about


def check_prompt(length: int, context: int, what: str) -> None:
    """Refuses a prompt that leaves no room for a reply.

    Args:
        length: length of the prompt, in tokens.
        context: most tokens of prompt and reply together.
        what: what the prompt is made of, for the error.

    Raises:
        ContextFull: it fills the context.
    """
    if length >= context:
        seen = f"{what} would be {length} tokens long, expected less than {context}"
        raise context_full(seen, context)


def within(effective: Effective, prompt: int, context: int, what: str) -> Effective:
    """Returns the settings of a reply that fits into the context after its prompt.

    A limit that is only a default is cut to the room that is left; the stored settings keep it.

    Args:
        effective: the settings.
        prompt: length of the prompt, in tokens.
        context: most tokens of prompt and reply together.
        what: what the prompt is made of, for the error.

    Raises:
        ContextFull: there is no room at all, or less than the caller asked for.
    """
    check_prompt(prompt, context, what)
    room, params = context - prompt, effective.params
    limit = params.get("max_new_tokens")
    if limit is None or limit <= room:
        return effective
    if effective.limit_given:
        raise _too_long("max_new_tokens", limit, room, prompt, context, what)
    least = params.get("min_new_tokens", 0)
    if least > room:
        raise _too_long("min_new_tokens", least, room, prompt, context, what)
    return replace(effective, params={**params, "max_new_tokens": room})


def _too_long(
    setting: str, value: int, room: int, prompt: int, context: int, what: str
) -> ContextFull:
    return about(
        setting,
        context_full(
            f"{setting} is {value}, expected at most {room} after the {prompt} tokens of {what}",
            context,
        ),
    )
