"""A finished reply, and the end of a generation that it is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmchat.errors import Error
from lmchat.store.turns import Timings, Turn, Usage
from turbomind import TokenLogprobs


@dataclass(frozen=True)
class Reply:
    """A finished generation.

    Of a continued reply, text and token ids are whole; usage, timings and logprobs are those of the
    last call.

    Attributes:
        text: the text to show.
        reasoning: the model's reasoning before the text.
        token_ids: token ids of the reply, its stop token included.
        finish_reason: "stop", "length", "cancelled" or "error"; of a followed reply also
            "interrupted", if its process ended.
        usage: token counts.
        timings: durations, in seconds.
        error: the error of finish_reason "error"; a StoreError if the reply could not be stored.
        logprobs: one entry per new token, if requested.
        turn: the stored turn, which repeats the fields above. None without a session, and for a
            turn that was cancelled before its first token, which leaves the session as it was.
        notices: sentences for the user about changes to earlier turns, such as the cost of a
            rewrite.
        others: choices after the first one, when `n` of them were requested. Only the usage of the
            first one counts the prompt, so that the counts of all can be added.
    """

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    error: Error | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    turn: Turn | None = field(default=None, repr=False)
    notices: tuple[str, ...] = ()
    others: tuple[Reply, ...] = ()


@dataclass
class Outcome:
    """The end of a choice. `token_ids` are those to store; `stopped` is True if the last of them is
    a stop token. `text` and `reasoning` are what they show. `others` are the choices after the
    first one."""

    token_ids: list[int]
    finish_reason: str
    stopped: bool
    error: Error | None
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()
    text: str = ""
    reasoning: str = ""
    others: tuple[Outcome, ...] = ()
