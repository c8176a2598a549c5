"""Reads the event stream of a completion: texts, tokens, usage, errors, with their times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StreamReader:
    """What an event stream has held so far. `feed` takes its bytes.

    Attributes:
        times: Arrival of each event that carries tokens, on the loop's clock.
        counts: Tokens of each such event, where it lists token ids or log-probabilities.
        texts: Texts of the answer; reasoning is not part of them.
        prompt_tokens: Tokens of the prompt by the server's usage.
        completion_tokens: Tokens of the reply by the server's usage.
        cached_tokens: Prompt tokens that the server did not compute, where it reports them.
        finish_reason: Why the server ended the reply.
        done: Whether the last event, [DONE], has arrived.
        error: The first error object in the stream.
        malformed: The first event that is not a completion.
    """

    times: list[float] = field(default_factory=list)
    counts: list[int | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    malformed: str | None = None
    _rest: bytes = b""
    _data: list[bytes] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the server ended the reply, rather than the connection."""
        return self.done or self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.texts)

    def feed(self, data: bytes, at: float) -> None:
        """Reads bytes of the stream.

        Args:
            data: Bytes, cut anywhere.
            at: When they arrived.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payload = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data = []
                self._event(payload, at)
            # Other lines are comments, and fields that completions do not use.

    def _event(self, payload: bytes, at: float) -> None:
        if payload.strip() == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(payload)
            if error := event.get("error"):
                found = error if isinstance(error, dict) else {"message": str(error)}
                self.error = self.error or found
                return
            if usage := event.get("usage"):
                self._usage(usage)
            for choice in event.get("choices") or ():
                self._choice(choice, at)
        except (ValueError, TypeError, AttributeError, KeyError):
            self.malformed = self.malformed or payload[:200].decode("utf-8", "replace")

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens", self.cached_tokens)

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        delta = choice.get("delta") or {}
        answer = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        count = _token_count(choice)
        if answer or reasoning or count:
            self.times.append(at)
            self.counts.append(count)
        if answer:
            self.texts.append(answer)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


def _token_count(choice: dict[str, Any]) -> int | None:
    """Returns the tokens of an event by its token ids or log-probabilities; None without them."""
    if ids := choice.get("token_ids"):
        return len(ids)
    logprobs = choice.get("logprobs") or {}
    listed = logprobs.get("content") or logprobs.get("tokens")
    return len(listed) if listed else None
