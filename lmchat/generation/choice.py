"""One choice of a generation: its tokens, their text, and its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from lmchat.errors import Error
from lmchat.generation.parts import Delta
from lmchat.generation.reply import Outcome
from lmchat.store.turns import Timings, Usage
from lmchat.text.replies.reply_parser import ReplyParser
from turbomind import Event, TokenLogprobs

Texts: TypeAlias = list[tuple[Literal["text", "reasoning"], str]]


class Choice:
    """Parses the events of one choice.

    Args:
        index: index of the choice.
        parser: parser of its tokens, which has read those of a continued reply.
        resumed: number of these.
    """

    __slots__ = (
        "_reasoned", "_resumed", "_shown", "arrived", "error", "finish_reason", "first", "index",
        "last", "logprobs", "parser", "stopped", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, parser: ReplyParser, resumed: int = 0) -> None:
        self.index = index
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.first = self.last = 0.0
        """Times of the first token and of the end."""
        self.arrived = 0.0
        """Time of the last tokens."""
        self.finish_reason = ""
        """Empty before the end."""
        self.stopped = False
        """Whether the last token is a stop token."""
        self.error: Error | None = None
        self._resumed = resumed
        self._reasoned = parser.reasoning_tokens
        self._shown = 0  # tokens that are in deltas

    def take(self, event: Event) -> list[Delta]:
        """Takes new tokens and returns what can be shown."""
        ids = event.token_ids
        if not self.first:
            self.first = event.seconds
        before = len(self.token_ids)
        self.token_ids += ids
        if event.logprobs:
            self.logprobs += event.logprobs
        texts = self.parser.push(ids)
        settled = self.parser.settled_tokens - self._resumed
        if self._shown == before and settled == before + len(ids):  # nothing is held back
            self._shown = settled
            return self._with_texts(texts, ids, event.logprobs, event.seconds)
        return self._up_to(settled, texts, event.seconds)

    def finish(self, reason: str, seconds: float, error: Error | None = None) -> list[Delta]:
        """Ends the choice and returns what was held back. A stop string ends it with "stop"."""
        parser = self.parser
        texts = parser.finish()
        self.last, self.finish_reason, self.stopped = seconds, reason, reason == "stop"
        self.error = error if reason == "error" else None
        if parser.stopped:
            self.finish_reason, self.stopped, self.error = "stop", False, None
            stored = max(0, parser.stored_tokens - self._resumed)
            del self.token_ids[stored:], self.logprobs[stored:]
        return self._up_to(len(self.token_ids), texts, seconds)

    def fail(self, error: Error, seconds: float) -> list[Delta]:
        """Ends the choice with an error, which may be one of the parser."""
        try:
            return self.finish("error", seconds, error)
        except Exception:
            self.last, self.finish_reason, self.error = seconds, "error", error
            return self._up_to(len(self.token_ids), [], seconds)

    def _up_to(self, settled: int, texts: Texts, seconds: float) -> list[Delta]:
        """Returns the texts as deltas with the tokens up to `settled`."""
        shown = self._shown
        if settled <= shown:
            return self._with_texts(texts, (), (), seconds)
        self._shown = settled
        ids, logprobs = self.token_ids[shown:settled], self.logprobs[shown:settled]
        return self._with_texts(texts, tuple(ids), tuple(logprobs), seconds)

    def _with_texts(
        self,
        texts: Texts,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        seconds: float,
    ) -> list[Delta]:
        """Returns the texts as deltas, the first of them with the tokens."""
        if not texts:
            empty = Delta(self.parser.kind, "", ids, logprobs, self.index, seconds)
            return [empty] if ids else []
        kind, text = texts[0]
        deltas = [Delta(kind, text, ids, logprobs, self.index, seconds)]
        for kind, text in texts[1:]:
            deltas.append(Delta(kind, text, (), (), self.index, seconds))
        return deltas

    def outcome(self, timings: Timings, event: Event | None, rewritten: int = 0) -> Outcome:
        """Returns the end of the choice.

        Args:
            timings: its durations.
            event: its last event, if that counts the prompt for the reply.
            rewritten: tokens of earlier turns that were replaced.
        """
        parser = self.parser
        usage = Usage(
            completion_tokens=len(self.token_ids),
            reasoning_tokens=parser.reasoning_tokens - self._reasoned,
            rewritten_tokens=rewritten,
        )
        if event is not None:
            usage = replace(
                usage,
                prompt_tokens=event.prompt_tokens,
                cached_tokens=event.reused_tokens,
                loaded_tokens=event.loaded_tokens,
                foreign_tokens=event.foreign_tokens,
            )
        return Outcome(
            self.token_ids,
            self.finish_reason,
            self.stopped,
            self.error,
            usage,
            timings,
            tuple(self.logprobs),
            parser.text,
            parser.reasoning,
        )
