"""Measures templating and tokenization of a turn after a long history; nothing is generated."""

from __future__ import annotations

import statistics
import time

from lmchat.store.turns import Turn
from lmchat.text.prompt import PromptBuilder
from lmchat.text.tokenizer import Tokenizer

RULES = ("append", "template")
HISTORY_TOKENS = 38_000
TIMED_TURNS = 9


def python_seconds(
    builder: PromptBuilder, tokenizer: Tokenizer, text: str, history_tokens: int = HISTORY_TOKENS
) -> dict[str, float]:
    """Returns, by history rule, the median seconds of a turn after a history.

    Args:
        builder: Renders the prompts.
        tokenizer: The tokenizer of the model.
        text: Text of every question and reply.
        history_tokens: Length of the history, in tokens.
    """
    return {rule: _seconds(builder, tokenizer, text, history_tokens, rule) for rule in RULES}


def _seconds(
    builder: PromptBuilder, tokenizer: Tokenizer, text: str, history_tokens: int, rule: str
) -> float:
    reply_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    reply_message = builder.reply_message(text, "", text)
    path: list[Turn] = []
    length = 0
    times: list[float] = []
    while len(times) < TIMED_TURNS:
        begin = time.perf_counter()
        suffix = builder.suffix(path, text, history=rule)
        seconds = time.perf_counter() - begin
        if length >= history_tokens:
            times.append(seconds)
        length = suffix.prefix_length + len(suffix.token_ids)
        ids, number = tuple(suffix.token_ids), len(path)
        parent = path[-1].id if path else None
        path.append(
            Turn(number, parent, "user", text, suffix.message, ids, suffix.prefix_length, length)
        )
        prefix_length, length = length, length + len(reply_ids)
        path.append(
            Turn(
                number + 1,
                number,
                "assistant",
                text,
                reply_message,
                reply_ids,
                prefix_length,
                length,
            )
        )
    return statistics.median(times)
