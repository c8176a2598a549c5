"""The form in which a template takes a reply, and the field for its reasoning."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message
from lmchat.text.reasoning import REASONING_FIELDS, SWITCHES, ReasoningFormat, ThinkingSwitch
from lmchat.text.template import ChatTemplate

_PROBE = "Zq7"  # a text that no template has


@dataclass(frozen=True)
class ReplyForm:
    """Returns the message of a reply.

    `field` takes the reasoning. A template without such a field gets the reply with its markers as
    content when `marked`, else only the visible text. `opening` is what the prompt itself puts in
    front of a reply that begins inside of its reasoning.
    """

    reasoning: ReasoningFormat | None = None
    field: str | None = None
    marked: bool = False
    opening: str = ""

    def message(self, text: str, reasoning: str, raw: str) -> Message:
        """Returns the message of a reply with this `text` and `reasoning`, generated as `raw`."""
        message: Message = {"role": "assistant", "content": text}
        if self.reasoning is None:
            return message
        if self.field:
            return {**message, self.field: reasoning} if reasoning else message
        if self.marked and (reasoning or self.reasoning.close in raw):
            opened = raw.lstrip().startswith(self.reasoning.open)
            message["content"] = raw if opened else self.opening + raw
        return message


def render_or_none(
    template: ChatTemplate, messages: list[Message], prompt: bool, variables: Mapping[str, Any]
) -> str | None:
    """Returns the rendering, or None where the template refuses the messages."""
    try:
        return template.render(messages, add_generation_prompt=prompt, **variables)
    except InvalidRequest:
        return None


def find_switch(template: ChatTemplate) -> ThinkingSwitch | None:
    """Returns the variable that switches the template's reasoning."""
    question: list[Message] = [{"role": "user", "content": "x"}]
    named = [switch for switch in SWITCHES if switch.variable in template.source]
    spelled = [switch for switch in named if _spelled(switch.off, template.source)]
    # A template that takes any word gets the mildest one.
    for switch in [*spelled, *(other for other in named[::-1] if other not in spelled)]:
        on, off = (
            render_or_none(template, question, True, {switch.variable: value})
            for value in (switch.on, switch.off)
        )
        if on is not None and off is not None and on != off:
            return switch
    return None


def _spelled(value: object, source: str) -> bool:
    return not isinstance(value, str) or f"'{value}'" in source or f'"{value}"' in source


def find_form(
    template: ChatTemplate, reasoning: ReasoningFormat | None, switch: ThinkingSwitch | None
) -> ReplyForm:
    """Finds the form of replies for `template` by trying it."""
    if reasoning is None:
        return ReplyForm()
    settings: list[dict[str, Any]] = [{}]
    if switch is not None:
        settings.append({switch.variable: switch.on})
    question: Message = {"role": "user", "content": "x"}
    opening = ""
    for variables in settings:
        prompt = render_or_none(template, [question], True, variables) or ""
        if reasoning.opened_by(prompt):
            opening = prompt[prompt.rindex(reasoning.open) :]
            break
    plain: Message = {"role": "assistant", "content": "Zx"}
    shown = render_or_none(template, [question, plain], False, {}) or ""
    changing = None
    for field, variables in itertools.product(REASONING_FIELDS, settings):
        found = render_or_none(template, [question, {**plain, field: _PROBE}], False, variables)
        if found is not None and _PROBE in found:
            return ReplyForm(reasoning, field, opening=opening)
        if found is not None and not variables and found != shown:
            changing = changing or field  # it is read, if not shown
    if changing:
        return ReplyForm(reasoning, changing, opening=opening)
    # A template that itself puts a block, or a header, in front wants the visible text alone.
    headed = shown.split("Zx")[0].rstrip().endswith((*reasoning.skip, reasoning.close))
    return ReplyForm(reasoning, marked=not headed, opening=opening)
