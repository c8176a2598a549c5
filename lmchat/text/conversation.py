"""Prompts of conversations that are given as messages, of any roles and in any order.

A reply that is known keeps its tokens; the text of another one is encoded by itself, so that no
token spans its ends. Everything else is what the template renders. A conversation of a system
prompt, questions and replies gets the same tokens as a session with these texts whose replies have
these tokens, under the template's default rule for earlier turns (`lmchat/text/prompt.py`).

The whole conversation is rendered at once, so the cost grows with its length and no faster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message, Turn, common_prefix
from lmchat.text.context_encoder import ContextEncoder
from lmchat.text.follow_rule import FollowRule
from lmchat.text.marks import Marks
from lmchat.text.reasoning import REASONING_FIELDS
from lmchat.text.recent import Recent
from lmchat.text.replies.reply_form import ReplyForm
from lmchat.text.scene import Scene, Stage, texts
from turbomind.params import about

_QUESTION: Message = {"role": "user", "content": "x"}
_PROBE = "Zq7"  # a text that no template has
_TAIL = 64  # tokens before a reply that decide how its first ones are spelled


@dataclass(frozen=True)
class Conversation:
    """Messages, and what else decides their prompt.

    Attributes:
        messages: the messages, each with "role" and "content".
        known: for each message the reply whose tokens are known, or None. Its `message` is what the
            template gets in place of the client's.
        variables: variables for the template.
        now: the time that the template sees; None: the clock's.
        generation_prompt: whether the header of the next reply ends the prompt.
        continued: whether the prompt ends inside of the last message, a reply that goes on.
    """

    messages: Sequence[Message]
    known: Sequence[Turn | None]
    variables: Mapping[str, Any] = field(default_factory=dict)
    now: datetime | None = None
    generation_prompt: bool = True
    continued: bool = False


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt. The last `resumed` of them are of a reply that goes on."""

    token_ids: list[int]
    resumed: int = 0


@dataclass(frozen=True)
class _Lead:
    """The text in front of a reply: what ends its prompt, and what the template shows there later.

    `header` is the end of the prompt that the template replaces by `past` once the reply is past.
    `appends` is whether a rendering is, apart from that, made of what was appended for each
    question. `context` are the last tokens of a prompt.
    """

    header: str
    past: str
    appends: bool
    context: tuple[int, ...]

    def before(self, content: str) -> str:
        """Returns the white space that a model writes in front of `content`."""
        spaces = self.past if not self.header and self.past.isspace() else ""
        return "" if spaces and content.startswith(spaces) else spaces

    def asked(self, part: str, is_known: bool) -> str:
        """Returns the text in front of a reply, from that in a rendering.

        In front of a reply of known tokens it is what was appended for the question. Another one
        has no tokens for what the model wrote between `header` and its text.
        """
        if is_known or (not self.header and self.past.isspace()):
            return part[: len(part) - len(self.past)] + self.header
        return part


class ConversationRule:
    """Makes prompts of conversations, for one template.

    Args:
        stage: renders conversations.
        encoder: encodes text.
        follow: the rule "template".
        form: the form in which the template takes replies.
        appends: whether the template's default rule for earlier turns is "append".
    """

    def __init__(
        self,
        stage: Stage,
        encoder: ContextEncoder,
        follow: FollowRule,
        form: ReplyForm,
        appends: bool,
    ) -> None:
        self._stage, self._encoder, self._follow, self._form = stage, encoder, follow, form
        self._appends = appends
        self._leads: Recent[object, _Lead] = Recent()
        self._ignored: Recent[object, bool] = Recent()

    def prompt(self, talk: Conversation) -> Prompt:
        """Returns the prompt of a conversation.

        Raises:
            InvalidRequest: the template refuses the messages, ignores the role of one, does not
                show a reply that goes on, or cannot show the spelling of a mark as text.
        """
        if talk.continued and (reply := talk.known[-1]) is not None:
            before = replace(
                talk, messages=talk.messages[:-1], known=talk.known[:-1], continued=False
            )
            ids = own_tokens(reply)
            return Prompt([*self.prompt(before).token_ids, *ids], len(ids))
        for role in {message["role"] for message in talk.messages} - {"user", "assistant"}:
            self._check_role(role, talk)
        lead = self._lead(talk)
        path = [self._turn(m, r, lead) for m, r in zip(talk.messages, talk.known, strict=True)]
        scene = Scene(path, {}, talk.variables, talk.now)
        made = self._appended(talk, scene, lead) if self._appends and lead.appends else None
        return made or self._followed(talk, scene, lead)

    # --- replies ---------------------------------------------------------------------------------

    def _turn(self, message: Message, known: Turn | None, lead: _Lead) -> Turn:
        """Returns the message as a turn. Those of the role "assistant" are made of own tokens."""
        if message["role"] != "assistant":
            return Turn(0, None, "user", "", message, lead.context)
        if known is not None:
            others = {k: v for k, v in message.items() if k not in REASONING_FIELDS}
            return replace(known, message={**others, **known.message})
        text = message.get("content") or ""
        return Turn(0, None, "assistant", text, message, self._encoded(lead, text))

    def _is_text(self, message: Message, known: Turn | None) -> bool:
        """Returns whether a reply is text of the template: it spells marks, or nothing."""
        return known is None and (not message.get("content") or self._stage.reply_spells(message))

    def _encoded(self, lead: _Lead, text: str) -> tuple[int, ...]:
        """Returns the tokens of a reply with this text, none of them marks of the template but
        those that replies have themselves."""
        return tuple(self._encoder.encode_reply(lead.context, text, lead.before(text)))

    # --- "append" --------------------------------------------------------------------------------

    def _appended(self, talk: Conversation, scene: Scene, lead: _Lead) -> Prompt | None:
        """Returns the prompt by the rule "append", or None where the rule "template" makes it: if
        there are replies of unknown tokens and more than a text, or the template does not show
        each reply once and in its place."""
        marks = Marks(texts([*(turn.message for turn in scene.path), scene.variables]))
        shown: list[Message] = []
        signs: list[str] = []
        replies: list[tuple[tuple[int, ...], bool]] = []
        for turn, known in zip(scene.path, talk.known, strict=True):
            message = turn.message
            if message["role"] == "assistant":
                fields = {k: v for k, v in message.items() if k not in REASONING_FIELDS}
                if known is None and (not turn.text or len(fields) < len(message)):
                    return None
                replies.append((own_tokens(turn), known is not None))
                signs.append(marks.take())
                others = {k: v for k, v in fields.items() if k != "content"}
                message = {**self._stage.guard(others, marks, own=False), "content": signs[-1]}
            else:
                message = self._stage.guard(message, marks)
            shown.append(message)
        header = talk.generation_prompt and not talk.continued
        text = self._stage.render(shown, scene, marks, prompt=header)
        parts = _split(text, signs)
        if parts is None or not all(part.endswith(lead.past) for part in parts[:-1]):
            return None
        ids: list[int] = []
        for part, (own_ids, is_known) in zip(parts, replies, strict=False):
            ids += self._encoder.encode(ids, lead.asked(part, is_known), marks)
            ids += own_ids
        if talk.continued:
            return Prompt(ids, len(replies[-1][0]))
        return Prompt(ids + self._encoder.encode(ids, parts[-1], marks))

    # --- "template" ------------------------------------------------------------------------------

    def _followed(self, talk: Conversation, scene: Scene, lead: _Lead) -> Prompt:
        """Returns the prompt by the rule "template"."""
        path = [
            replace(turn, role="text")
            if turn.role == "assistant" and self._is_text(turn.message, known)
            else turn
            for turn, known in zip(scene.path, talk.known, strict=True)
        ]
        scene = replace(scene, path=path)
        marks = Marks(texts([*(turn.message for turn in path), scene.variables]))
        if not talk.continued:
            ids = self._follow.conversation(scene, marks, prompt=talk.generation_prompt)
            return Prompt(ids)
        last, sign = path[-1], marks.take()
        scene = replace(scene, path=path[:-1])
        message = self._stage.guard(last.message, marks, own=False)
        message = {**message, "content": sign + message["content"]}
        ids = self._follow.conversation(
            scene, marks, [message], end=(lead.before(last.text), sign), prompt=False
        )
        own = self._encoded(lead, last.text)
        return Prompt([*ids, *own], len(own))

    # --- the template ----------------------------------------------------------------------------

    def _check_role(self, role: str, talk: Conversation) -> None:
        """Raises InvalidRequest if the template leaves out messages of this role."""
        key = (role, repr(sorted(talk.variables.items())))
        ignored = self._ignored.get(key)
        if ignored is None:
            message: Message = {"role": role, "content": _PROBE, "name": "x"}
            reply: Message = {"role": "assistant", "content": "x"}
            after = [_QUESTION, reply, message] if role == "tool" else [message, _QUESTION]
            scene = Scene((), {}, talk.variables, talk.now)
            try:
                marks = Marks(texts([talk.variables]))
                shown = self._stage.render(after, scene, marks, check=False)
            except InvalidRequest:  # it may take the role elsewhere
                shown = _PROBE
            ignored = self._ignored.put(key, _PROBE not in shown)
        if ignored:
            what = "system prompt" if role == "system" else f"role {role!r}"
            does = "system prompts" if role == "system" else "its messages"
            refusal = InvalidRequest(f"{what}: the model's chat template ignores {does}")
            raise about("system" if role == "system" else "messages", refusal)

    def _lead(self, talk: Conversation) -> _Lead:
        """Returns what holds for conversations with these variables, found by some renderings."""
        has_system = bool(talk.messages) and talk.messages[0]["role"] == "system"
        key = (has_system, repr(sorted(talk.variables.items())))
        return self._leads.get(key) or self._leads.put(key, self._find_lead(talk, has_system))

    def _find_lead(self, talk: Conversation, has_system: bool) -> _Lead:
        system: list[Message] = [{"role": "system", "content": "x"}] if has_system else []
        scene, marks = Scene((), {}, talk.variables, talk.now), Marks(texts([talk.variables]))

        def parts(replies: Sequence[Message]) -> list[str]:
            rounds = [message for reply in replies for message in (_QUESTION, reply)]
            text = self._stage.render([*system, *rounds, _QUESTION], scene, marks, check=False)
            return _split(text, [reply["content"] for reply in replies]) or []

        replies: list[Message] = [{"role": "assistant", "content": marks.take()} for _ in range(4)]
        try:
            first = parts([])[0]
            found = [parts(replies[:count]) for count in (1, 2, 4)]
            if self._form.field:
                found.append(parts([{**replies[0], self._form.field: "x"}]))
        except InvalidRequest:
            return _Lead("", "", False, ())
        context = tuple(self._encoder.encode((), first, marks)[-_TAIL:])
        if not all(found):
            return _Lead("", "", False, context)
        whole = found[2]
        common = common_prefix(first, whole[0])
        header, past = first[common:], whole[0][common:]
        ends_alike = len({some[-1] for some in found}) == 1 and whole[-1].endswith(header)
        body = whole[-1][: len(whole[-1]) - len(header)]
        follows = all(part == body + past for part in whole[1:-1])
        return _Lead(header, past, ends_alike and follows, context)


def own_tokens(reply: Turn) -> tuple[int, ...]:
    """Returns a reply's tokens without its stop token."""
    return reply.token_ids[: len(reply.token_ids) - reply.stopped]


def _split(text: str, signs: Sequence[str]) -> list[str] | None:
    """Returns the parts of `text` between the signs, or None unless it has each once, in order."""
    if not signs:
        return [text]
    pieces = re.split(f"([{signs[0]}-{signs[-1]}])", text)
    return pieces[::2] if pieces[1::2] == list(signs) else None
