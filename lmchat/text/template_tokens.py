"""The added tokens that a chat template writes, found by trying it.

A template writes marks around turns, reasoning and calls of tools. Most are special tokens, but
some tokenizers have them as ordinary added ones. Whatever their kind, a user's text must not become
one, and the one after a reply ends it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmchat.store.turns import Message
from lmchat.text.reasoning import REASONING_FIELDS
from lmchat.text.replies.reply_form import render_or_none
from lmchat.text.spellings import is_mark
from lmchat.text.template import ChatTemplate
from lmchat.text.template_class import TemplateInfo
from lmchat.text.tokenizer import Tokenizer

_REPLY, _THOUGHT = "Zq7", "Zq8"  # texts that no template has
_QUESTION: Message = {"role": "user", "content": "x"}
_ANSWER: Message = {"role": "assistant", "content": _REPLY}
_ANSWERED: tuple[list[Message], ...] = ([_QUESTION, _ANSWER], [_QUESTION, _ANSWER, _QUESTION])
_LED: tuple[list[Message], ...] = (
    [{"role": "system", "content": "x"}, _QUESTION, _ANSWER, _QUESTION],
    [{"role": "developer", "content": "x"}, _QUESTION],
    [{**_QUESTION, "name": "x"}],
)
_CALL_ID = "abcde1234"  # of the form that Mistral's templates want
_RESULT: Message = {"role": "tool", "content": "x", "name": "x", "tool_call_id": _CALL_ID}
_TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "x",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class TemplateTokens:
    """Ids of added tokens that a template writes.

    Attributes:
        marks: all of them.
        replies: those that a reply itself has, around its reasoning and its calls of tools.
        ends: those right after a reply.
    """

    marks: frozenset[int] = frozenset()
    replies: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()


def template_tokens(
    template: ChatTemplate, tokenizer: Tokenizer, info: TemplateInfo
) -> TemplateTokens:
    """Returns the tokens that `template` writes. `info` is what is known about it."""
    found = _Trial(template, tokenizer, info)
    turns, calls = found.turns(), found.calls
    replies = (calls - turns) | found.of_reasoning
    written = found.ids(
        [*template.literals(), *found.rendered([[_QUESTION]], [{"tools": [_TOOL]}])]
    )
    return TemplateTokens(turns | calls | replies | written, replies, found.ends())


class _Trial:
    """Renderings of small conversations.

    Args:
        template: the template.
        tokenizer: the tokenizer, which finds tokens in them.
        info: what is known about the template.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, info: TemplateInfo) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._marks = {i for text, i in tokenizer.added_texts.items() if is_mark(text)}
        switch, form = info.switch, info.reasoning
        self._settings: list[dict[str, Any]] = [{}]
        if switch is not None:
            self._settings += [{switch.variable: switch.on}, {switch.variable: switch.off}]
        self.of_reasoning = self.ids([form.open, form.close, *form.skip] if form else ())
        """The tokens of the markers of reasoning."""

    def rendered(
        self,
        talks: Iterable[list[Message]],
        settings: Iterable[Mapping[str, Any]] = ({},),
        *,
        prompt: bool = False,
    ) -> list[str]:
        """Returns the renderings of conversations that the template takes.

        Args:
            talks: the conversations.
            settings: variables of the template, each for all conversations.
            prompt: whether the start of a reply follows.
        """
        pairs = itertools.product(talks, settings)
        texts = [render_or_none(self._template, talk, prompt, found) for talk, found in pairs]
        return [text for text in texts if text is not None]

    def ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Returns the added tokens in texts that look like marks."""
        found: set[int] = set()
        for text in dict.fromkeys(texts):
            found.update(self._tokenizer.encode(text, add_special_tokens=False))
        return frozenset(found & self._marks)

    def turns(self) -> frozenset[int]:
        """Returns the tokens in conversations of all roles, without those of calls of tools."""
        texts = self._answers + self.rendered(_LED)
        texts += self.rendered([[_QUESTION]], self._settings, prompt=True)
        answered = self.ids(self.rendered(self._called(answered=True)))
        return self.ids(texts) | (answered - self.calls)

    @functools.cached_property
    def _answers(self) -> list[str]:
        """Renderings of a reply, alone and with the next question."""
        return self.rendered(_ANSWERED, self._settings)

    @functools.cached_property
    def calls(self) -> frozenset[int]:
        """The tokens in conversations whose reply calls a tool."""
        return self.ids(self.rendered(self._called(answered=False)))

    @staticmethod
    def _called(*, answered: bool) -> Iterable[list[Message]]:
        """Yields a call of a tool with the arguments in both usual forms."""
        for arguments in ({"a": "x"}, '{"a": "x"}'):
            function = {"name": "x", "arguments": arguments}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            yield [_QUESTION, reply, *([_RESULT] if answered else [])]

    def ends(self) -> frozenset[int]:
        """Returns the tokens right after a reply that are not inside of replies too."""
        found: set[int] = set()
        for text in self._answers:
            _, is_there, after = text.rpartition(_REPLY)
            ids = self._tokenizer.encode(after.lstrip(), add_special_tokens=False)
            found.update(ids[:1] if is_there else [])
        return (frozenset(found) & self._marks) - self.of_reasoning - self._inner()

    def _inner(self) -> frozenset[int]:
        """Returns the tokens between the reasoning of a reply and its text."""
        between: list[str] = []
        fields = [field for field in REASONING_FIELDS if field in self._template.source]
        talks = [[_QUESTION, {**_ANSWER, field: _THOUGHT}] for field in fields]
        for text in self.rendered(talks, self._settings):
            _, _, rest = text.partition(_THOUGHT)
            between += rest.split(_REPLY)[:-1]
        return self.ids(between)
