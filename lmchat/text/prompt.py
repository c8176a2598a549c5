"""Prompts: the token ids of a conversation, and the rules by which a transcript grows.

A transcript is token ids. The text of a first question is the template's rendering of it, encoded
in one piece; the template puts the special tokens that it wants, and the tokenizer adds none. What
a model generated is never tokenised again: a reply stays in the transcript as the ids that came.
Everything else is encoded after the tokens in front of it, so that no token depends on where a
turn began; but a token never spans the border between a reply and the template's text.

What happens to earlier turns when a question is appended is the session's rule, its *history*:

**append**
    The transcript stays as it is. Appended is what the template puts between the end of the last
    reply's content and the start of the next reply, and nothing else. Where the template trims
    white space at the ends of a reply, the white space that was generated stays.

**template**
    The transcript becomes what the template renders for the whole conversation. Each reply's text
    in it is made of the reply's own ids: all of them where the rendering holds the reply as it was
    generated; else the tokens of the text and of the reasoning that the template shows, cut at
    token borders (a token that a text shares with white space stays whole, one that it shares
    with anything else is left out and its part of the text encoded). Tokens up to the first
    difference from the old transcript stay, the rest is replaced.

Where a rendering only appends, both rules give the same ids.

A reply's stop token was never computed by the model, only chosen. When the template continues with
that very token it stays; otherwise it is dropped, under both rules, and does not count as
rewritten. A reply cut short has none, and the template's own end of turn is appended.

A user's text is plain text: where it spells marks (special tokens, and added tokens that the
template writes), it is encoded by itself and gives none of them.

A reply whose text a template changes in some other way than by leaving out its ends or its
reasoning cannot be found in the rendering. Under "template" the rendered words are then encoded.

Without a template a conversation is plain text: the first question is encoded with the tokens that
the tokenizer itself adds, the later ones after the transcript, and stop tokens are dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from lmchat.store.turns import Message, Turn
from lmchat.text.append_rule import AppendRule
from lmchat.text.context_encoder import ContextEncoder
from lmchat.text.conversation import Conversation, ConversationRule, Prompt, own_tokens
from lmchat.text.follow_rule import FollowRule
from lmchat.text.marks import Marks
from lmchat.text.reasoning import ReasoningFormat
from lmchat.text.replies.reply_form import ReplyForm
from lmchat.text.scene import Scene, Stage, Suffix, texts
from lmchat.text.template import ChatTemplate
from lmchat.text.template_class import TemplateInfo, check_system, examine
from lmchat.text.template_tokens import TemplateTokens, template_tokens
from lmchat.text.tokenizer import Tokenizer
from turbomind.params import wrong

HISTORIES = ("append", "template")
"""The rules for earlier turns: they stay as they were, or the template renders them again."""

__all__ = ["Conversation", "Prompt", "PromptBuilder", "Suffix"]


class PromptBuilder:
    """Turns conversations into token ids. Safe to use from many threads.

    Args:
        tokenizer: the tokenizer as its files have it.
        template: the chat template. None: a conversation is plain text.
        ends: the end tokens that the model's configuration names.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, ends: Iterable[int] = ()
    ) -> None:
        self._read = tokenizer
        self._template = template
        self._ends = tuple(ends)

    @functools.cached_property
    def _examined(self) -> tuple[TemplateInfo, ReplyForm]:
        return examine(self._template, self._read.added_texts)

    @functools.cached_property
    def _written(self) -> TemplateTokens:
        if self._template is None:
            return TemplateTokens()
        return template_tokens(self._template, self._read, self.info)

    @functools.cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: those of the configuration, the tokenizer's own end token, and
        the one that the template writes after a reply."""
        own = self._read.special_texts.get(self._read.named.get("eos_token", ""))
        found = [*self._ends, *([] if own is None else [own]), *sorted(self._written.ends)]
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which knows the tokens that the template writes and those that end a
        reply."""
        return self._read.with_tokens(self._written, self.end_token_ids)

    @functools.cached_property
    def _encoder(self) -> ContextEncoder:
        return ContextEncoder(self.tokenizer)

    @functools.cached_property
    def _rules(self) -> tuple[Stage, AppendRule, FollowRule, ConversationRule] | None:
        if self._template is None:
            return None
        stage = Stage(self._template, self.tokenizer)
        info, form = self._examined
        follow = FollowRule(self.tokenizer, stage, self._encoder, form)
        appends = info.default_history == "append"
        whole = ConversationRule(stage, self._encoder, follow, form, appends)
        return stage, AppendRule(stage, self._encoder), follow, whole

    @property
    def info(self) -> TemplateInfo:
        """The template's class, found by some renderings at the first use."""
        return self._examined[0]

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The markers of the model's reasoning; None where it has none."""
        return self.info.reasoning

    def starts_in_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """Returns whether a reply to `prompt` (its end is enough) starts inside its reasoning."""
        if self.reasoning is None:
            return False
        text = prompt if isinstance(prompt, str) else self.tokenizer.raw(prompt[-64:])
        return self.reasoning.opened_by(text)

    def reply_message(self, text: str, reasoning: str, raw: str) -> Message:
        """Returns the message of a reply with this visible text and reasoning.

        `raw` is the reply with its special tokens spelled out, without its stop token.
        """
        return self._examined[1].message(text, reasoning, raw)

    def reply_tokens(self, text: str) -> list[int]:
        """Returns the tokens of a reply that is known by its text alone.

        Raises InvalidRequest for a text that is no Unicode.
        """
        return self._encoder.encode_reply((), text)

    def check_system(self, path: Sequence[Turn]) -> None:
        """Raises InvalidRequest when `path` begins with a system turn that would have no effect."""
        if path and path[0].role == "system":
            check_system(self.info)

    def suffix(
        self,
        path: Sequence[Turn],
        text: str,
        *,
        history: str,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> Suffix:
        """Returns what becomes of the transcript of `path` when `text` is asked next.

        `path` goes from the root to the last reply; it is empty, or a system turn alone, before the
        first question. `history` is "append" or "template", `variables` go to the template and
        `now` is the time it sees. Raises InvalidRequest when the template refuses the conversation
        (in its own words), when it would not show its system prompt, when `text` is no Unicode, or
        for another `history`.
        """
        check_history(history)
        scene = Scene(path, {"role": "user", "content": text}, dict(variables or {}), now)
        if self._rules is None:
            return self._plain(scene)
        stage, append, follow, _ = self._rules
        self.check_system(path)
        if scene.replies == 0:
            return self._first(scene, stage)
        suffix = append.suffix(scene) if history == "append" else None
        return suffix or follow.suffix(scene)

    def conversation(self, talk: Conversation) -> Prompt:
        """Returns the prompt of a conversation that is given as messages.

        Raises:
            InvalidRequest: the template refuses the messages in its own words, ignores the role of
                one, or does not show a reply that goes on. Without a template: the messages are not
                questions and replies in turn.
        """
        if self._rules is None:
            return self._plain_conversation(talk)
        return self._rules[3].prompt(talk)

    def _first(self, scene: Scene, stage: Stage) -> Suffix:
        """Encodes the first question: the whole rendering in one piece."""
        messages = [*scene.system, scene.question]
        marks = Marks(texts([*messages, scene.variables]))
        text = stage.render([stage.guard(m, marks) for m in messages], scene, marks)
        return Suffix(scene.question, 0, self._encoder.encode((), text, marks))

    def _plain(self, scene: Scene) -> Suffix:
        text = scene.question["content"]
        if scene.system:
            check_system(self.info)
        if not scene.path:
            return Suffix(scene.question, 0, self.tokenizer.encode(text, parse_special=False))
        _, body = scene.transcript
        marks = Marks([text])
        return Suffix(
            scene.question,
            len(body),
            list(self._encoder.encode(body, f"{marks.begin}{text}{marks.end}", marks)),
        )

    def _plain_conversation(self, talk: Conversation) -> Prompt:
        ids: list[int] = []
        own: Sequence[int] = ()
        for i, (message, known) in enumerate(zip(talk.messages, talk.known, strict=True)):
            text, expected = message.get("content"), ("user", "assistant")[i % 2]
            if message["role"] == "system":
                check_system(self.info)
            if message["role"] != expected or not isinstance(text, str):
                expected = f"{expected!r} with a text: the model has no chat template"
                raise wrong(f"messages[{i}].role", message["role"], expected)
            marks = Marks([text])
            if i == 0:
                own = self.tokenizer.encode(text, parse_special=False)
            elif known is not None:
                own = own_tokens(known)
            else:
                own = self._encoder.encode(ids, f"{marks.begin}{text}{marks.end}", marks)
            ids += own
        return Prompt(ids, len(own) if talk.continued else 0)


def check_history(history: object) -> str:
    """Returns `history`. Raises InvalidRequest unless it is "append" or "template"."""
    if history not in HISTORIES:
        former = "; the rule 'keep' is called 'append' now" if history == "keep" else ""
        raise wrong("history", history, f"'append' or 'template'{former}")
    return str(history)
