"""Settings of requests: their names and types, and their conversion to the core's option structs.

A wrong name, type or range raises InvalidRequest with the name, the value seen and what is
expected.
"""

from __future__ import annotations

import itertools
import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, TypedDict

import turbomind._C as _C
from turbomind.errors import InvalidRequest
from turbomind.near import suggestion
from turbomind.shown import shown


class SamplingSettings(TypedDict, total=False):
    """Settings that choose the generated tokens and the end of a generation.

    Names and meanings are those of Hugging Face's generation config where it has one. None, or an
    absent key, means the default. The settings act on the logits in this order: repetition,
    presence and frequency penalty, logit bias, bad words, min_new_tokens, temperature, top_k,
    top_p, min_p.

    Keys:
        max_new_tokens: Most tokens to generate, at least 1. Default: to the end of the context.
        min_new_tokens: Tokens before which no stop or end token is sampled, at least 0 and at most
            max_new_tokens. Default 0.
        temperature: Divisor of the logits, at least 0; 0 takes the most likely token (greedy).
            Default 1.0.
        top_k: Samples from the k most likely tokens, 0 or more; 0 means all. Default 0.
        top_p: Samples from the most likely tokens that together have this probability, above 0 and
            at most 1. Default 1.0.
        min_p: Drops tokens less likely than this share of the most likely one's probability, 0 to
            1. Default 0.0.
        repetition_penalty: Divides the logits of tokens of prompt and output if positive, else
            multiplies them; above 0. Default 1.0.
        presence_penalty: Subtracted from the logits of tokens that the output has; finite. Default
            0.0.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the output;
            finite. Default 0.0.
        logit_bias: {token id: number added to its logit}, finite or -inf, at most 16,384. Default:
            none.
        bad_words: Token sequences that are never generated, at most 4,096, each of 1 to 256 tokens.
            Default: none.
        stop_token_ids: Tokens that end the generation with "stop"; the token is part of the output.
            At most 4,096. Default: none.
        eos_token_ids: Tokens that end the generation unless `ignore_eos`, at most 4,096. Default:
            the model's.
        ignore_eos: Continues after a token of `eos_token_ids`. Default False.
        seed: Key of the random numbers (Philox), 0 to 2**64 - 1. Default: a random one, which the
            result reports.
        attempt: Counter that gives other tokens with the same seed, for a retry; 0 to 2**32 - 1.
            Default 0.
        continued: Number of last prompt tokens that presence and frequency penalty count as output,
            so that a stopped generation continues as if it had not been stopped; 0 to the length
            of the prompt. Default 0.
        n: Choices to generate from one prompt, 1 to 256; a handle takes 1 only. Default 1.
        logprobs: Reports the log-probability of each generated token and of the k most likely ones,
            0 to 256. Default: none are reported.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Iterable[Sequence[int]] | None
    stop_token_ids: Iterable[int] | None
    eos_token_ids: Iterable[int] | None
    ignore_eos: bool | None
    seed: int | None
    attempt: int | None
    continued: int | None
    n: int | None
    logprobs: int | None


class ScheduleSettings(TypedDict, total=False):
    """Settings of any request.

    Keys:
        priority: Requests of a lower number are served first, equal ones in order of arrival; 32
            bits, signed. Default 0.
        exact: Computes again the KV that another build or machine has computed, which may differ
            in its last bits. Default False.
    """

    priority: int | None
    exact: bool | None


class RequestSettings(ScheduleSettings, total=False):
    """Settings of a request without a handle; a handle has its own salt and retention priority.

    Keys, beside those of `ScheduleSettings`:
        retention_priority: Pages of a lower number are evicted first once nothing refers to them;
            finite. Default 0.0.
        salt: Owner of the KV; only requests and handles of equal salts share pages. Default "".
    """

    retention_priority: float | None
    salt: str | None


class HandleSettings(SamplingSettings, ScheduleSettings, total=False):
    """Settings of `Handle.generate()`: the keys of `SamplingSettings` and `ScheduleSettings`."""


class StreamSettings(SamplingSettings, RequestSettings, total=False):
    """Settings of `Engine.stream()`: the keys of `SamplingSettings` and `RequestSettings`."""


# What each setting expects, for messages. The keys are those of the TypedDicts above.
SAMPLING = {
    "max_new_tokens": "an integer of at least 1, or None for the rest of the context",
    "min_new_tokens": "an integer below 2**31",
    "temperature": "a number, 0 for greedy",
    "top_k": "an integer below 2**31, 0 for all",
    "top_p": "a number",
    "min_p": "a number",
    "repetition_penalty": "a number",
    "presence_penalty": "a number",
    "frequency_penalty": "a number",
    "logit_bias": "a mapping from token id to number",
    "bad_words": "a list of token id lists",
    "stop_token_ids": "a list of token ids",
    "eos_token_ids": "a list of token ids",
    "ignore_eos": "True or False",
    "seed": "an integer from 0 to 2**64 - 1",
    "attempt": "an integer from 0 to 2**32 - 1",
    "continued": "an integer from 0 to the length of the prompt",
    "n": "a small integer",
    "logprobs": "a small integer of at least 0, or None for none",
}
MAX_SIZE = 1 << 62
_NUMBER_KINDS = "iufO"  # of numpy's dtypes
MOST_ENTRIES = {
    "logit_bias": 16_384,
    "bad_words": 4_096,
    "stop_token_ids": 4_096,
    "eos_token_ids": 4_096,
}
"""Most entries of the settings that are lists. Each of them costs time in every step."""
MOST_WORD_TOKENS = 256
"""Most tokens of one of the `bad_words`."""
_LEAST = {"max_new_tokens": 1, "logprobs": 0}  # -1 stands for None in the core's struct
REQUEST = {
    "priority": "an integer of 32 bits, lower is served first",
    "retention_priority": "a number",
    "salt": "a string",
    "exact": "True or False",
}


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InvalidRequest for the first unknown name, with a near one or all known ones."""
    known = list(known)
    for name in given:
        if name not in known:
            raise InvalidRequest(f"unknown {what} {shown(name)}{suggestion(str(name), known)}")


def wrong(name: str, value: object, expected: str) -> InvalidRequest:
    """Returns the error of a wrong value, which it shows in at most 120 characters."""
    return InvalidRequest(f"{name} is {shown(value)}, expected {expected}")


def check_count(name: str, value: object) -> None:
    """Raises InvalidRequest for more entries than MOST_ENTRIES allows."""
    most = MOST_ENTRIES.get(name)
    if most is not None and isinstance(value, Sized) and len(value) > most:
        raise InvalidRequest(f"{name} has {len(value)} entries, expected at most {most}")
    if name == "bad_words" and isinstance(value, list | tuple):
        for i, word in enumerate(value):
            if isinstance(word, Sized) and len(word) > MOST_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words[{i}] has {len(word)} tokens, expected at most {MOST_WORD_TOKENS}"
                )


def _is_number(value: Any) -> bool:
    """Returns whether a value may be a number of any library. A truth value is not one, an array
    without dimensions is."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return not isinstance(value, bool)
    return getattr(dtype, "kind", "O") in _NUMBER_KINDS and "bool" not in str(dtype)


def integer_of(value: Any) -> int:
    """Returns an integer of any library as an int. Raises TypeError for anything else."""
    if not _is_number(value):
        raise TypeError(f"{type(value).__name__} is not an integer")
    return operator.index(value)


def number_of(value: Any) -> float:
    """Returns a number of any library as a float. Raises TypeError for anything else, and NaN."""
    kind = type(value)
    has_value = hasattr(kind, "__float__") or hasattr(kind, "__index__")
    if not has_value or not _is_number(value) or math.isnan(value):
        raise TypeError(f"{kind.__name__} is not a number")
    return float(value)


def items_of(value: Any) -> Iterable[Any]:
    """Returns an iterable as it is. Raises TypeError where its items are characters, bytes or
    keys."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__} is not a list")
    return value


def ids_of(value: Any) -> list[int]:
    """Returns the token ids in an iterable. Raises TypeError for anything else."""
    return [integer_of(item) for item in items_of(value)]


def integer(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int, also from a numpy integer.

    Raises:
        InvalidRequest: The value is no integer from `low` to `high`.
    """
    try:
        number: int | None = integer_of(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidRequest(f"{name} is {shown(value)}, expected an integer from {low} to {high}")
    return number


def set_option(target: Any, name: str, value: Any, expected: str) -> None:
    """Sets a field of a core struct; raises InvalidRequest for a value of another type or range."""
    now = getattr(target, name)  # has the field's type
    try:
        if any(isinstance(value, kind) != isinstance(now, kind) for kind in (bool, str)):
            raise TypeError
        if isinstance(now, int) and not isinstance(now, bool):
            value = integer_of(value)
        elif isinstance(now, float):
            value = number_of(value)
        setattr(target, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name} is {shown(value)}, expected {expected}") from error


def retention_priority_of(value: float) -> float:
    """Returns a checked retention priority, rounded to float32."""
    options = _C.HandleOptions()
    set_option(options, "retention_priority", value, REQUEST["retention_priority"])
    return options.retention_priority


def sampling_params(
    given: Mapping[str, Any], eos_token_ids: Sequence[int]
) -> tuple[_C.SamplingParams, int]:
    """Converts sampling settings; None means the default, and without a seed a random one is set.

    Returns:
        The core's struct and the seed that applies.
    """
    params = _C.SamplingParams()
    params.eos_token_ids = list(eos_token_ids)
    for name in SAMPLING:
        value: Any = given.get(name)
        if value is None:
            continue
        check_count(name, value)
        if name in MOST_ENTRIES:
            value = _entries(name, value)
        set_option(params, name, value, SAMPLING[name])
        if name in _LEAST and value < _LEAST[name]:
            raise wrong(name, value, SAMPLING[name])
    if given.get("seed") is None:
        params.seed = secrets.randbits(63)
    return params, params.seed


def _entries(name: str, value: Any) -> list[Any]:
    """Returns the value of a setting that is a list, as the core takes it."""
    try:
        if name == "logit_bias":
            if not isinstance(value, Mapping):
                raise TypeError
            return [(integer_of(i), number_of(bias)) for i, bias in value.items()]
        listed = list(itertools.islice(items_of(value), MOST_ENTRIES[name] + 1))
        check_count(name, listed)
        return [ids_of(word) for word in listed] if name == "bad_words" else ids_of(listed)
    except TypeError as error:
        raise wrong(name, value, SAMPLING[name]) from error


def request_options(given: Mapping[str, Any], kind: str = "generate") -> _C.RequestOptions:
    """Converts `priority`, `retention_priority`, `salt` and `exact` to the core's struct."""
    options = _C.RequestOptions()
    options.kind = kind
    for name, expected in REQUEST.items():
        if given.get(name) is not None:
            set_option(options, name, given[name], expected)
    return options


def token_id_list(token_ids: Iterable[int], vocab: int, name: str = "token_ids") -> list[int]:
    """Returns token ids as plain ints; InvalidRequest names the first outside the vocabulary."""
    # Sets and mappings have no order that the caller has chosen.
    if isinstance(token_ids, str | bytes | Set | Mapping) or not isinstance(token_ids, Iterable):
        raise InvalidRequest(
            f"{name} is a {type(token_ids).__name__}, expected a sequence of token ids"
        )
    try:
        ids = ids_of(token_ids)
    except TypeError as error:
        raise InvalidRequest(f"{name} holds a value that is not an integer: {error}") from error
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise InvalidRequest(f"{name}[{at}] is {shown(ids[at])}, expected 0 to {vocab - 1}")
    return ids
