"""Replies in OpenAI's words: finish reasons, usage, metrics and log-probabilities."""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Sequence
from typing import Any

from lmchat.generation.reply import Reply
from lmchat.text.tokenizer import Tokenizer
from turbomind import TokenLogprobs


def new_id(kind: str, given: str | None = None) -> str:
    """Returns the id of a response.

    Args:
        kind: what is in front of it, such as "chatcmpl".
        given: the part that the client has chosen; None: a random one.
    """
    return f"{kind}-{given or secrets.token_hex(16)}"


def finish_reason(reply: Reply) -> str:
    """Returns "length" or "stop". The latter is also that of a reply which another client
    stopped."""
    return "length" if reply.finish_reason == "length" else "stop"


def all_choices(replies: Sequence[Reply]) -> list[Reply]:
    """Returns the choices of some prompts, in the order of their indices."""
    return [choice for reply in replies for choice in (reply, *reply.others)]


def raise_failed(replies: Sequence[Reply]) -> None:
    """Raises the error of a reply that ended with one."""
    for reply in all_choices(replies):
        if reply.error is not None:
            raise reply.error


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Returns the usage of a request: one reply for each of its prompts."""
    counts = [choice.usage for choice in all_choices(replies)]
    prompt = sum(count.prompt_tokens for count in counts)
    completion = sum(count.completion_tokens for count in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(count.cached_tokens for count in counts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(count.reasoning_tokens for count in counts)
        },
    }


def metrics(replies: Sequence[Reply]) -> dict[str, float | None]:
    """Returns the durations of a request, by vLLM's names.

    The time to the first token and the time of generation do not include that in the queue. Of
    several choices, the first token of all counts, the longest generation, and the mean of the mean
    times between tokens.
    """
    choices = [one for one in all_choices(replies) if one.usage.completion_tokens]
    if not choices:
        return dict.fromkeys(
            (
                "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
                "tokens_per_second",
            )
        )  # fmt: skip
    times = [one.timings for one in choices]
    spans = [one.tpot for one in times if one.tpot]
    busy = max(one.total - one.queued for one in times)
    tokens = sum(one.usage.completion_tokens for one in choices)
    return {
        "time_to_first_token_ms": _ms(min(one.ttft - one.queued for one in times)),
        "generation_time_ms": _ms(max(one.total - one.ttft for one in times)),
        "queue_time_ms": _ms(max(one.queued for one in times)),
        "mean_itl_ms": _ms(sum(spans) / len(spans)) if spans else None,
        "tokens_per_second": round(tokens / busy, 3) if busy > 0 else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class TokenNames:
    """Spells the tokens of one choice, in the order in which they come.

    Args:
        tokenizer: the model's tokenizer.
        shows_special: whether special tokens are part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._before: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def chat(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Returns the entries of `logprobs.content` for the next tokens."""
        entries: list[dict[str, Any]] = []
        for token, found in zip(ids, logprobs, strict=True):
            entry = self._entry(token, found.logprob)
            entry["top_logprobs"] = [self._entry(one, logprob) for one, logprob in found.top]
            entries.append(entry)
            self._pass(token)
        return entries

    def completion(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
    ) -> dict[str, Any]:
        """Returns the `logprobs` of a completion for the next tokens.

        Args:
            ids: the tokens.
            logprobs: one entry per token.
            top: number of alternatives that the client wants.
        """
        tokens, offsets, alternatives = [], [], []
        for token, found in zip(ids, logprobs, strict=True):
            tokens.append(self._text(token))
            offsets.append(self._offset)
            best = {self._text(one): logprob for one, logprob in reversed(found.top)}
            alternatives.append({**dict(reversed(best.items())), self._text(token): found.logprob})
            self._pass(token)
        return {
            "tokens": tokens,
            "token_logprobs": [found.logprob for found in logprobs],
            "top_logprobs": alternatives if top else None,
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = self._tokenizer.token_bytes(token, self._before)
        return {"token": _spelled(spelling), "logprob": logprob, "bytes": list(spelling)}

    def _text(self, token: int) -> str:
        return _spelled(self._tokenizer.token_bytes(token, self._before))

    def _pass(self, token: int) -> None:
        if self._shows_special or token not in self._tokenizer.special_ids:
            spelling = self._tokenizer.token_bytes(token, self._before)
            self._offset += len(self._decoder.decode(spelling))
        if self._tokenizer.is_word(token):
            self._before = token


def _spelled(spelling: bytes) -> str:
    """Returns the text of a token, in OpenAI's form for one that is a part of a character."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
