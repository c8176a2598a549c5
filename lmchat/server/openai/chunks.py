"""Chunks of a stream: server-sent events whose constant parts are encoded once.

A stream sends one chunk per token, so its cost is that of the whole server at many streams. Only
the new text is encoded for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from lmchat.generation.parts import Delta, Progress
from lmchat.generation.reply import Reply
from lmchat.server.dialects.results import TokenNames, finish_reason, metrics, usage
from lmchat.server.openai.envelope import Envelope
from lmchat.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


class Chunks:
    """Makes the events of one stream.

    Args:
        envelope: the fields of each chunk.
        include_usage: whether the usage comes last, and null before.
        names: spells tokens, one for each choice; None: no log-probabilities.
    """

    def __init__(
        self, envelope: Envelope, include_usage: bool, names: Sequence[TokenNames] | None
    ) -> None:
        self._head = envelope.head()
        self._include_usage = include_usage
        self._names = names
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def begin(self, index: int) -> bytes:
        """Returns the first chunk of a choice, maybe nothing."""
        raise NotImplementedError

    def delta(self, index: int, delta: Delta) -> bytes:
        """Returns the chunk of new text or log-probabilities of a choice, nothing for neither."""
        raise NotImplementedError

    def finish(self, index: int, reply: Reply, replies: Sequence[Reply], is_last: bool) -> bytes:
        """Returns the last chunk of a choice. `replies` has one for each prompt."""
        raise NotImplementedError

    def _event(self, choice: str, more: str = "") -> bytes:
        return f'{self._head}"choices":[{choice}]{more}{self._tail}'.encode()

    def _final(self, replies: Sequence[Reply], is_last: bool) -> str:
        """Returns the metrics for the last choice of a stream without usage."""
        if self._include_usage or not is_last:
            return ""
        return f',"metrics":{compact(metrics(replies))}'

    def progress(self, progress: Progress, seconds: float) -> bytes:
        """Returns the report of the prompt's progress, in llama.cpp's form."""
        found = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.done,
            "time_ms": round(seconds * 1000),
        }
        return self._event("", f',"prompt_progress":{compact(found)}')

    def end(self, replies: Sequence[Reply]) -> bytes:
        """Returns the usage, if the client wants it, and the end."""
        if not self._include_usage:
            return DONE
        last = compact(usage(replies))
        times = compact(metrics(replies))
        body = f'{self._head}"choices":[],"usage":{last},"metrics":{times}}}\n\n'
        return body.encode() + DONE


class ChatChunks(Chunks):
    """Chunks of a chat completion."""

    def __init__(
        self,
        envelope: Envelope,
        include_usage: bool = False,
        names: Sequence[TokenNames] | None = None,
    ) -> None:
        super().__init__(envelope, include_usage, names)
        self._heads: dict[tuple[int, str], str] = {}
        self._plain = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def begin(self, index: int) -> bytes:
        """Returns the chunk with the role."""
        return self._event(
            f'{{"index":{index},"delta":{{"role":"assistant","content":""}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """Returns the chunk of new text, reasoning or log-probabilities."""
        if self._names is not None:
            return self._with_logprobs(index, delta, self._names[index])
        if not delta.text:
            return b""
        head = self._heads.get((index, delta.kind))
        if head is None:
            head = f'{self._head}"choices":[{{"index":{index},"delta":{{"{_field(delta)}":'
            self._heads[index, delta.kind] = head
        return f"{head}{encode_basestring_ascii(delta.text)}{self._plain}".encode()

    def _with_logprobs(self, index: int, delta: Delta, names: TokenNames) -> bytes:
        if not delta.text and not delta.token_ids:
            return b""
        entries = names.chat(delta.token_ids, delta.logprobs)
        found = compact({"content": entries, "refusal": None})
        text = encode_basestring_ascii(delta.text)
        return self._event(
            f'{{"index":{index},"delta":{{"{_field(delta)}":{text}}},'
            f'"logprobs":{found},"finish_reason":null}}'
        )

    def finish(self, index: int, reply: Reply, replies: Sequence[Reply], is_last: bool) -> bytes:
        """Returns the chunk with the finish reason."""
        return self._event(
            f'{{"index":{index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{finish_reason(reply)}"}}',
            self._final(replies, is_last),
        )


class CompletionChunks(Chunks):
    """Chunks of a completion.

    Args:
        envelope: the fields of each chunk.
        include_usage: whether the usage comes last.
        names: spells tokens, one for each choice; None: no log-probabilities.
        top: number of alternatives per token.
    """

    def __init__(
        self,
        envelope: Envelope,
        include_usage: bool = False,
        names: Sequence[TokenNames] | None = None,
        top: int = 0,
    ) -> None:
        super().__init__(envelope, include_usage, names)
        self._top = top

    def begin(self, index: int) -> bytes:
        """Returns nothing: a completion has no role."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """Returns the chunk of new text or log-probabilities."""
        found = "null"
        if self._names is not None and delta.token_ids:
            entries = self._names[index].completion(delta.token_ids, delta.logprobs, self._top)
            found = compact(entries)
        elif not delta.text:
            return b""
        return self._choice(index, encode_basestring_ascii(delta.text), found, "null")

    def finish(self, index: int, reply: Reply, replies: Sequence[Reply], is_last: bool) -> bytes:
        """Returns the chunk with the finish reason."""
        reason = f'"{finish_reason(reply)}"'
        return self._choice(index, '""', "null", reason, self._final(replies, is_last))

    def _choice(self, index: int, text: str, logprobs: str, reason: str, more: str = "") -> bytes:
        choice = f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return self._event(choice, more)


def names_of(
    tokenizer: Tokenizer, choices: int, shows_special: bool, wanted: int | None
) -> list[TokenNames] | None:
    """Returns what spells the tokens of each choice; None without log-probabilities."""
    if wanted is None:
        return None
    return [TokenNames(tokenizer, shows_special) for _ in range(choices)]


def _field(delta: Delta) -> str:
    return "content" if delta.kind == "text" else "reasoning_content"


def compact(value: Any) -> str:
    """Returns the JSON of a value, without spaces and all ASCII, so that it is one line for every
    client."""
    return json.dumps(value, separators=(",", ":"))
