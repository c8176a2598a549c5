"""A conversation and its next question, as the history rules take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.turns import Message, Turn, transcript
from lmchat.text.context_encoder import ContextEncoder, digest_of
from lmchat.text.marks import Marks
from lmchat.text.reasoning import REASONING_FIELDS
from lmchat.text.recent import Recent
from lmchat.text.template import ChatTemplate


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
    """Renders conversations. In users' texts it marks spellings of special tokens."""

    def __init__(self, template: ChatTemplate, encoder: ContextEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._special: Recent[bytes, bool] = Recent(16_384)
        self._headers: Recent[str, str] = Recent()

    def guard(self, message: Message, marks: Marks, *, own: bool | None = None) -> Message:
        """Returns the message with marks around texts in it that spell special tokens.

        A reply that is made of its `own` tokens stays as it is. Default: each assistant's.
        """
        if message["role"] == "assistant" if own is None else own:
            return message

        def literal(text: str) -> str:
            return marks.literal(text) if self.spells_special(text) else text

        return {
            key: value if key == "role" else mapped(value, literal)
            for key, value in message.items()
        }

    def spells_special(self, text: str) -> bool:
        """Returns whether encoding `text` alone gives a special token, cached."""
        key = digest_of(text)
        special = self._special.get(key)
        if special is None:
            special = self._special.put(key, self._encoder.spells_special(text))
        return special

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
        text = self._render(messages, scene, prompt)
        if check and any(marks.begin in shown for shown in texts(messages)):
            plain = [mapped(message, marks.without_literals) for message in messages]
            if marks.without_literals(text) != self._render(plain, scene, prompt):
                raise InvalidRequest(
                    "the text spells special tokens of the model, which its chat template cannot "
                    "show as plain text"
                )
        return text

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


def texts(messages: Iterable[Message]) -> list[str]:
    """Returns the strings in messages."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, list):
            for part in value:
                collect(part)

    for message in messages:
        collect(message)
    return found


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns `value` with all strings in it changed, but for the keys of mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    return value


def blank(reply: Message, content: str) -> Message:
    """Returns a reply with other words: `content`, and "x" for its reasoning."""
    fields = {key: "x" for key in REASONING_FIELDS if reply.get(key)}
    return {**reply, **fields, "content": content}


def rounds(count: int, reply: Message | None = None) -> list[Message]:
    """Returns `count` artificial questions and replies."""
    answer = reply or {"role": "assistant", "content": "x"}
    return [message for _ in range(count) for message in ({"role": "user", "content": "x"}, answer)]
