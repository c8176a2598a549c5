"""The class of a chat template: how it treats a growing conversation, found by trying it.

The prompt of every turn should be the prompt of the turn before, the reply as it was generated, and
what follows. Templates are classed by how far that holds:

- **append**: always.
- **trim**: but for white space at the ends of replies.
- **rewrite**: not. Earlier turns change: the reasoning of a reply is dropped once the next question
  comes, an empty reasoning block appears in front of it, the system prompt moves to the last
  question.
- **none**: there is no template; a conversation is plain text that goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message
from lmchat.text.reasoning import ReasoningFormat, ThinkingSwitch, reasoning_format
from lmchat.text.replies.reply_form import ReplyForm, find_form, find_switch, render_or_none
from lmchat.text.template import ChatTemplate
from turbomind.params import about


@dataclass(frozen=True)
class TemplateInfo:
    """A template's class.

    `kind` is "append", "trim", "rewrite" or "none". `system` is the treatment of a system prompt:
    "yes", "refused" or "ignored". `default_history` is the rule for earlier turns that fits:
    "append", or "template" for one that rewrites them. `notes` are sentences for a user.
    `developer` is whether it has a role of this name beside "system".
    """

    kind: str
    system: str
    reasoning: ReasoningFormat | None = None
    switch: ThinkingSwitch | None = None
    default_history: str = "append"
    notes: tuple[str, ...] = ()
    developer: bool = False


_KINDS = ("append", "trim", "rewrite")
_SYSTEM = "Zsystem"
_QUESTIONS = ("Zfirst", "Zsecond", "Zthird")
_ANSWERS = ("Zone", "Ztwo")
_THOUGHTS = ("Zthought", "Zidea")


def examine(
    template: ChatTemplate | None, added_texts: Collection[str]
) -> tuple[TemplateInfo, ReplyForm]:
    """Returns the class of `template`, and the form in which it takes replies.

    `added_texts` are spellings of the tokenizer's added tokens.
    """
    if template is None:
        reasoning = reasoning_format("", added_texts)
        return TemplateInfo("none", "refused", reasoning), ReplyForm(reasoning)
    reasoning = reasoning_format(template.source, added_texts)
    try:
        template.render([{"role": "user", "content": _QUESTIONS[0]}])
    except InvalidRequest as error:
        refusal = f"refuses a question: {error}"
        return TemplateInfo("append", "yes", reasoning, notes=(refusal,)), ReplyForm(reasoning)
    switch = find_switch(template)
    form = find_form(template, reasoning, switch)
    system = _system(template)
    cases = [
        _Case(template, form, with_system, thinks, variables)
        for with_system in ((False, True) if system == "yes" else (False,))
        for thinks in ((False, True) if reasoning else (False,))
        for variables in ([{}, {switch.variable: switch.on}] if switch else [{}])
    ]
    kind = max((case.kind for case in cases), key=_KINDS.index)
    notes = dict.fromkeys(note for case in cases for note in case.notes())
    history = "template" if kind == "rewrite" else "append"
    developer = "developer" in template.source
    info = TemplateInfo(kind, system, reasoning, switch, history, tuple(notes), developer)
    return info, form


def _system(template: ChatTemplate) -> str:
    question: Message = {"role": "user", "content": _QUESTIONS[0]}
    shown = render_or_none(template, [{"role": "system", "content": _SYSTEM}, question], True, {})
    if shown is None:
        return "refused"
    return "yes" if _SYSTEM in shown else "ignored"


class _Case:
    """A conversation of three questions: what the template shows before each reply, and what a
    model trained on it writes there."""

    def __init__(
        self,
        template: ChatTemplate,
        form: ReplyForm,
        with_system: bool,
        thinks: bool,
        variables: Mapping[str, Any],
    ) -> None:
        self._with_system, self._thinks = with_system, thinks
        self._prompts: list[str] = []
        self._replies: list[str] = []
        messages: list[Message] = []
        if with_system:
            messages.append({"role": "system", "content": _SYSTEM})
        for question, answer, thought in zip(
            _QUESTIONS, (*_ANSWERS, ""), (*_THOUGHTS, ""), strict=True
        ):
            messages.append({"role": "user", "content": question})
            prompt = render_or_none(template, messages, True, variables)
            self._refused = prompt is None
            if prompt is None or not self._possible(form, prompt):
                break
            self._prompts.append(prompt)
            if answer:
                raw = self._usual(form, prompt, answer, thought)
                messages.append(form.message(answer, thought if thinks else "", raw))
                shown = render_or_none(template, messages, False, variables) or ""
                whole = answer in shown and (thought in shown or not thinks)
                if shown.startswith(prompt) and whole:
                    raw = shown[len(prompt) : shown.rindex(answer) + len(answer)]
                self._replies.append(raw)
        self.kind = max(
            map(self._step, range(len(self._prompts) - 1)), key=_KINDS.index, default="append"
        )

    def _possible(self, form: ReplyForm, prompt: str) -> bool:
        """Returns whether a model replies with or without reasoning to this prompt."""
        marks = form.reasoning
        if marks is None:
            return True
        return not (marks.closed_by(prompt) if self._thinks else marks.opened_by(prompt))

    def _usual(self, form: ReplyForm, prompt: str, answer: str, thought: str) -> str:
        """Returns a reply with the usual line breaks."""
        marks = form.reasoning
        if marks is None or not self._thinks:
            return answer
        begun = "" if marks.opened_by(prompt) else f"{marks.open}\n"
        return f"{begun}{thought}\n{marks.close}\n\n{answer}"

    def _step(self, i: int) -> str:
        past, after = self._prompts[i] + self._replies[i], self._prompts[i + 1]
        if after.startswith(past) and not (self._replies[i][:1].isspace() and not self._thinks):
            return "append"
        return "trim" if _squeeze(after).startswith(_squeeze(past)) else "rewrite"

    def notes(self) -> list[str]:
        """Returns the changes as sentences."""
        if self._refused:
            return ["refuses a conversation of several turns"]
        last = self._prompts[-1] if self._prompts else ""
        if self.kind == "append":
            return []
        if self.kind == "trim":
            return ["changes white space at the ends of replies"]
        found: list[str] = []
        if self._with_system and last.find(_SYSTEM) > last.find(_QUESTIONS[0]):
            found.append("moves the system prompt to the last question")
        if self._thinks and not all(thought in last for thought in _THOUGHTS):
            found.append("drops the reasoning of earlier replies")
        return found or ["changes what stands in front of earlier replies"]


def _squeeze(text: str) -> str:
    return "".join(text.split())


def check_system(info: TemplateInfo) -> None:
    """Raises InvalidRequest unless system prompts have an effect."""
    if info.kind == "none":
        text = "system prompt: the model has no chat template that could take one"
        raise about("system", InvalidRequest(text))
    if info.system != "yes":
        does = "refuses" if info.system == "refused" else "ignores"
        text = f"system prompt: the model's chat template {does} system prompts"
        raise about("system", InvalidRequest(text))
