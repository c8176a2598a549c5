"""Settings of a request: a row for each, and the classes of keywords that the rows are in.

A row is the one place that says what a setting is: what it may be, its default and its text. From
the rows come the checks of `params`, the settings of sessions (`lmchat.generation.settings`), and
the tables of the documentation. Names and meanings are those of Hugging Face's generation config
where it has one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

MAX_INT = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
MAX_CHOICES = 256
MAX_LOGPROBS = 256
MOST_WORD_TOKENS = 256
"""Most tokens of one of the `bad_words`."""
MAX_FLOAT = (2.0 - 2.0**-23) * 2.0**127  # of the core's 32-bit floats


@dataclass(frozen=True)
class Setting:
    """A row.

    Attributes:
        text: What the setting is, for people, in a line.
        expected: What it may be, in words.
        default: What applies without it, in words.
        in_sessions: What applies without it in a session and to chat, where that is another.
        more: What programs want to know beside `text`.
        fits: Whether a value of the right type is in range; None where all of the core's are.
        most: Most entries of a list. Each of them costs time in every step.
        of_model: A model's generation_config.json sets it for sampling.
    """

    text: str
    expected: str
    default: str
    in_sessions: str = ""
    more: str = ""
    fits: Callable[[Any], bool] | None = None
    most: int | None = None
    of_model: bool = False

    @property
    def whole_text(self) -> str:
        """The text with all details, in sentences."""
        most = f"At most {self.most:,}." if self.most is not None else ""
        return " ".join(filter(None, (f"{self.text}.", most, self.more)))

    @property
    def session_default(self) -> str:
        """What applies without it in a session and to chat."""
        return self.in_sessions or self.default


class TokenSettings(TypedDict, total=False):
    """Settings that choose tokens and the end of a generation, of engines and of sessions."""

    max_new_tokens: Annotated[
        int | None,
        Setting(
            "longest reply in tokens",
            f"an integer from 1 to {MAX_INT}",
            "up to the end of the context",
            fits=lambda v: v >= 1,  # -1 stands for None in the core's struct
        ),
    ]
    min_new_tokens: Annotated[
        int | None,
        Setting(
            "tokens before the reply may end",
            f"an integer from 0 to {MAX_INT}",
            "0",
            more="No stop or end token is sampled before. At most `max_new_tokens`.",
            fits=lambda v: v >= 0,
        ),
    ]
    temperature: Annotated[
        float | None,
        Setting(
            "how evenly tokens are sampled; 0: always the most likely one",
            "a number of at least 0",
            "1",
            "that of the model, which is 0 unless its configuration samples",
            more="Divisor of the logits.",
            fits=lambda v: 0 <= v <= MAX_FLOAT,
            of_model=True,
        ),
    ]
    top_k: Annotated[
        int | None,
        Setting(
            "sample from the k most likely tokens; 0: from all",
            f"an integer from 0 to {MAX_INT}",
            "0",
            "50 for a model whose configuration samples without naming one, else 0",
            fits=lambda v: v >= 0,
            of_model=True,
        ),
    ]
    top_p: Annotated[
        float | None,
        Setting(
            "sample from the most likely tokens that together have this probability",
            "a number above 0, at most 1",
            "1",
            fits=lambda v: 0 < v <= 1,
            of_model=True,
        ),
    ]
    min_p: Annotated[
        float | None,
        Setting(
            "drop tokens under this part of the most likely one's probability",
            "a number from 0 to 1",
            "0",
            fits=lambda v: 0 <= v <= 1,
            of_model=True,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Setting(
            "above 1: tokens of the conversation become less likely",
            "a number above 0",
            "1",
            more="Divides positive and multiplies negative logits of tokens of prompt and reply.",
            fits=lambda v: 0 < v <= MAX_FLOAT,
            of_model=True,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Setting(
            "taken from the logit of tokens that the reply has",
            "a finite number",
            "0",
            fits=lambda v: abs(v) <= MAX_FLOAT,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Setting(
            "taken from a token's logit for each time the reply has it",
            "a finite number",
            "0",
            fits=lambda v: abs(v) <= MAX_FLOAT,
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Setting(
            "added to logits, by token id",
            "a mapping from token id to number",
            "nothing",
            more="Finite or -inf, which excludes a token.",
            most=16_384,
        ),
    ]
    bad_words: Annotated[
        Iterable[Sequence[int]] | None,
        Setting(
            "sequences of token ids that are never produced",
            "a list of token id lists",
            "none",
            more=f"Each has 1 to {MOST_WORD_TOKENS} tokens.",
            most=4_096,
        ),
    ]
    stop_token_ids: Annotated[
        Iterable[int] | None,
        Setting(
            "more tokens that end the reply",
            "a list of token ids",
            "none",
            more="The token is part of the output.",
            most=4_096,
        ),
    ]
    eos_token_ids: Annotated[
        Iterable[int] | None,
        Setting(
            "tokens that end the reply, in place of the model's",
            "a list of token ids",
            "those of the model",
            most=4_096,
        ),
    ]
    ignore_eos: Annotated[
        bool | None,
        Setting("on: continue after the model's end token", "True or False", "off"),
    ]
    seed: Annotated[
        int | None,
        Setting(
            "makes the sampling repeatable",
            f"an integer from 0 to {MAX_SEED}",
            "a random one, which the result reports",
            more="Key of the random numbers (Philox).",
        ),
    ]
    logprobs: Annotated[
        int | None,
        Setting(
            "log-probabilities of the k most likely tokens beside the reply's",
            f"an integer from 0 to {MAX_LOGPROBS}",
            "none at all, not those of the reply either",
            fits=lambda v: 0 <= v <= MAX_LOGPROBS,
        ),
    ]


CHOICES = Setting(
    "number of choices",
    f"an integer from 1 to {MAX_CHOICES}",
    "1",
    more="Replies to the same prompt, which is computed once. Each samples tokens of its own, and "
    "ends by itself. Handles and sessions have one.",
    fits=lambda v: 1 <= v <= MAX_CHOICES,
)
EXACT = Setting(
    "on: compute again what another kind of machine has computed",
    "True or False",
    "off",
    more="KV of another build or machine may differ in its last bits.",
)


class SamplingSettings(TokenSettings, total=False):
    """Settings that choose the generated tokens and the end of a generation.

    None, or an absent key, means the default. The settings act on the logits in this order:
    repetition, presence and frequency penalty, logit bias, bad words, `min_new_tokens`, then
    temperature and the cuts by rank, probability and share, in the order of the keys.
    """

    attempt: Annotated[
        int | None,
        Setting(
            "gives other tokens with the same seed, for a retry",
            f"an integer from 0 to {(1 << 32) - 1}",
            "0",
        ),
    ]
    continued: Annotated[
        int | None,
        Setting(
            "last prompt tokens that count as the reply's own",
            "an integer from 0 to the length of the prompt",
            "0",
            more="Presence and frequency penalty count them, so that a stopped generation "
            "continues as if it had not been stopped.",
            fits=lambda v: v >= 0,
        ),
    ]
    n: Annotated[int | None, CHOICES]


class ScheduleSettings(TypedDict, total=False):
    """Settings of any request."""

    priority: Annotated[
        int | None,
        Setting(
            "requests of a lower number are served first, equal ones in order of arrival",
            "an integer of 32 bits, lower is served first",
            "0",
        ),
    ]
    exact: Annotated[bool | None, EXACT]


class RequestSettings(ScheduleSettings, total=False):
    """Settings of a request without a handle; a handle has its own salt and retention priority."""

    retention_priority: Annotated[
        float | None,
        Setting(
            "pages of a lower number are evicted first once nothing refers to them",
            "a finite number",
            "0",
            fits=lambda v: abs(v) <= MAX_FLOAT,
        ),
    ]
    salt: Annotated[
        str | None,
        Setting(
            "owner of the KV; only requests and handles of equal salts share pages",
            "a string",
            "the empty one",
        ),
    ]


class HandleSettings(SamplingSettings, ScheduleSettings, total=False):
    """Settings of `Handle.generate()`: those of `SamplingSettings` and `ScheduleSettings`."""


class StreamSettings(SamplingSettings, RequestSettings, total=False):
    """Settings of `Engine.stream()`: those of `SamplingSettings` and `RequestSettings`."""


def rows_of(settings: type) -> dict[str, Setting]:
    """Returns the rows of a class of settings by name."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items()}


def kinds_of(settings: type) -> dict[str, type | None]:
    """Returns int, float or bool for each setting that is one number or flag, None for others."""
    found = {}
    for name, hint in get_type_hints(settings).items():
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        found[name] = kinds[0] if kinds in ([int], [float], [bool]) else None
    return found


def document(settings: type, *, sessions: bool = False) -> None:
    """Adds the rows to the docstring of a class of settings, for help().

    Args:
        settings: The class.
        sessions: Its defaults are those of sessions.
    """
    lines = [f"{settings.__doc__}".rstrip(), "", "    Keys:"]
    for name, row in rows_of(settings).items():
        default = row.session_default if sessions else row.default
        expected = row.expected[0].upper() + row.expected[1:]
        text = f"{name}: {row.whole_text} {expected}. Default: {default}."
        lines += textwrap.wrap(text, 92, initial_indent=" " * 8, subsequent_indent=" " * 12)
    settings.__doc__ = "\n".join([*lines, "    "])


for _kind in (SamplingSettings, ScheduleSettings, RequestSettings):
    document(_kind)

SAMPLING = rows_of(SamplingSettings)
"""The rows of settings that choose tokens."""
REQUEST = rows_of(RequestSettings)
"""The rows of settings of any request."""
MOST_ENTRIES = {name: row.most for name, row in SAMPLING.items() if row.most is not None}
"""Most entries of the settings that are lists."""
