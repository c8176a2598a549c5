"""A conversation and its next question, as the history rules take them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message, Turn, transcript
from lmchat.text.context_encoder import digest_of
from lmchat.text.marks import Marks
from lmchat.text.reasoning import REASONING_FIELDS
from lmchat.text.recent import Recent
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer

CANNOT_SHOW = (
    "the text spells special tokens of the model, which its chat template cannot show as plain text"
)
_SAID = ("content", *REASONING_FIELDS)  # fields of a reply that have its own words


@dataclass(frozen=True)
class Suffix:
    """The continuation of a transcript: its first `prefix_length` tokens, then `token_ids`.

    `message` is the question as the template gets it. `rewritten` tokens of the old transcript were
    replaced because the template changes earlier turns; a dropped stop token does not count.
    """

    message: Message
    prefix_length: int
    token_ids: list[int]
    rewritten: int = 0


@dataclass(frozen=True)
class Scene:
    """The turns up to the last reply, the question, and what else the template gets."""

    path: Sequence[Turn]
    question: Message
    variables: Mapping[str, Any]
    now: datetime | None

    @functools.cached_property
    def system(self) -> list[Message]:
        """The system prompt's message, if there is one."""
        return [turn.message for turn in self.path[:1] if turn.role == "system"]

    @property
    def replies(self) -> int:
        """Number of replies."""
        return (len(self.path) - len(self.system)) // 2

    @functools.cached_property
    def setting(self) -> tuple[bool, str]:
        """Facts that may decide how the template treats a conversation: whether there is a system
        prompt, and the variables."""
        return bool(self.system), repr(sorted(self.variables.items()))

    @functools.cached_property
    def transcript(self) -> tuple[list[int], list[int]]:
        """Returns the transcript, and the same without a stop token at its end."""
        whole = transcript(list(self.path))
        stopped = bool(self.path) and self.path[-1].stopped
        return whole, whole[:-1] if stopped else whole

    def close(self, ids: Sequence[int]) -> Suffix:
        """Returns the suffix where `ids` follow the transcript without its stop token."""
        whole, body = self.transcript
        if len(whole) > len(body) and ids and ids[0] == whole[-1]:
            return Suffix(self.question, len(whole), list(ids[1:]))
        return Suffix(self.question, len(body), list(ids))


class Stage:
    """Renders conversations. In users' texts it marks spellings of the template's tokens."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._spelled: Recent[bytes, bool] = Recent(16_384)
        self._headers: Recent[str, str] = Recent()

    def guard(self, message: Message, marks: Marks, *, own: bool | None = None) -> Message:
        """Returns the message with marks around texts in it that spell tokens of the template, or
        could do so together with the text beside them.

        A reply that is made of its `own` tokens stays as it is. Default: each assistant's. In the
        text of another reply, tokens that replies have themselves stay tokens.
        """
        is_reply = message["role"] == "assistant"
        if is_reply if own is None else own:
            return message

        def said(text: str) -> str:
            parts = self._tokenizer.own_parts(text)
            parts[::2] = [self._literal(part, marks) for part in parts[::2]]
            return "".join(parts)

        def typed(text: str) -> str:
            return self._literal(text, marks)

        return {
            key: value
            if key == "role"
            else mapped(value, said if is_reply and key in _SAID else typed, self._key(marks))
            for key, value in message.items()
        }

    def mark_reply(self, reply: Message, marks: Marks) -> tuple[Message, list[tuple[str, str]]]:
        """Returns a generated reply with a pair of marks around each spelling of a token of the
        template in its words, apart from tokens that it has itself, and the pairs."""
        pairs: list[tuple[str, str]] = []

        def around(found: re.Match[str]) -> str:
            pairs.append((marks.take(), marks.take()))
            return f"{pairs[-1][0]}{found.group()}{pairs[-1][1]}"

        def marked(text: str) -> str:
            parts = self._tokenizer.own_parts(text, generated=True)
            for i, part in enumerate(parts[::2]):
                if self.spells_mark(part):
                    parts[2 * i] = self._tokenizer.spellings.pattern.sub(around, part)
            return "".join(parts)

        words = {key: value for key, value in reply.items() if key != "role"}
        return {**reply, **mapped(words, marked, str)}, pairs

    def _literal(self, text: str, marks: Marks) -> str:
        suspect = self.spells_mark(text) or self._tokenizer.spellings.may_join(text.strip())
        return marks.literal(text) if suspect else text

    def _key(self, marks: Marks) -> Callable[[str], str]:
        """Returns a function that marks names of fields: templates look for their usual names."""
        return lambda text: marks.literal(text) if self.spells_mark(text) else text

    def spells_mark(self, text: str) -> bool:
        """Returns whether encoding `text` alone gives a token of the template, cached."""
        key = digest_of(text)
        spelled = self._spelled.get(key)
        if spelled is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            spelled = not self._tokenizer.mark_ids.isdisjoint(ids)
            self._spelled.put(key, spelled)
        return spelled

    def reply_spells(self, reply: Message) -> bool:
        """Returns whether the text of a reply of unknown tokens spells tokens of the template,
        apart from those that replies have themselves."""
        words = {key: value for key, value in reply.items() if key != "role"}
        return any(
            self.spells_mark(part)
            for text in texts([words])
            for part in self._tokenizer.own_parts(text)[::2]
        )

    def render(
        self,
        messages: Sequence[Message],
        scene: Scene,
        marks: Marks,
        *,
        check: bool = True,
        prompt: bool = True,
    ) -> str:
        """Returns the text of the messages, and with `prompt` the start of the next reply.

        Raises InvalidRequest when the template changes marked text, unless not to `check` that.
        """
        guarded = self._guarded_variables(scene, marks)
        text = self._render(messages, guarded, prompt)
        found = texts([*messages, guarded.variables])
        if check and any(marks.begin in part for part in found):
            bare = marks.without_literals
            plain = [mapped(message, bare, bare) for message in messages]
            unmarked = self._render(plain, scene, prompt)
            if bare(text) != unmarked or not marks.are_paired(text):
                if any(self.spells_mark(bare(part)) for part in found if marks.begin in part):
                    raise InvalidRequest(CANNOT_SHOW)
                return unmarked
        return self._settled(text, marks)

    def _guarded_variables(self, scene: Scene, marks: Marks) -> Scene:
        """Returns the scene with marks around texts of its variables that spell tokens."""
        key = self._key(marks)
        found = {name: mapped(value, key, key) for name, value in scene.variables.items()}
        return scene if found == scene.variables else replace(scene, variables=found)

    def _settled(self, text: str, marks: Marks) -> str:
        """Returns a rendering without the marks around texts that spell no token of the template,
        and make none with the text beside them: they are encoded in one piece with it."""
        if marks.begin not in text:
            return text
        parts = [(part, marks.bare(part), plain) for part, plain in marks.split(text)]
        whole = "".join(bare for _, bare, _ in parts)
        at, settled = 0, []
        for part, bare, plain in parts:
            end = at + len(bare)
            if plain and (
                self.spells_mark(bare) or self._spans(whole, at) or self._spans(whole, end)
            ):
                part = f"{marks.begin}{part}{marks.end}"
            settled.append(part)
            at = end
        return "".join(settled)

    def _spans(self, text: str, at: int) -> bool:
        reach = self._tokenizer.spellings.longest
        return self._tokenizer.spellings.span(text[max(at - reach, 0) : at], text[at : at + reach])

    def header(self, scene: Scene) -> str:
        """Returns the text that the template puts before the next reply."""
        key = scene.setting[1]
        header = self._headers.get(key)
        if header is None:
            question: Message = {"role": "user", "content": "x"}
            begun, ended = (self._render([question], scene, prompt) for prompt in (True, False))
            header = begun.removeprefix(ended) if begun.startswith(ended) else ""
            self._headers.put(key, header)
        return header

    def _render(self, messages: Sequence[Message], scene: Scene, prompt: bool = True) -> str:
        return self._template.render(
            messages, add_generation_prompt=prompt, now=scene.now, **scene.variables
        )


def texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the strings in messages, names of fields included."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                collect(key)
                collect(part)
        elif isinstance(value, list | tuple):
            for part in value:
                collect(part)

    for message in messages:
        collect(message)
    return found


def mapped(value: Any, change: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """Returns `value` with all strings in it changed, those that are keys of mappings by `key`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key(name) if isinstance(name, str) else name: mapped(part, change, key)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [mapped(part, change, key) for part in value]
    return value


def blank(reply: Message, content: str) -> Message:
    """Returns a reply with other words: `content`, and "x" for its reasoning."""
    fields = {key: "x" for key in REASONING_FIELDS if reply.get(key)}
    return {**reply, **fields, "content": content}


def rounds(count: int, reply: Message | None = None) -> list[Message]:
    """Returns `count` artificial questions and replies."""
    answer = reply or {"role": "assistant", "content": "x"}
    return [message for _ in range(count) for message in ({"role": "user", "content": "x"}, answer)]
