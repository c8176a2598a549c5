"""Python values to the core's option structs; wrong names, types and ranges are InvalidRequest."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import turbomind._C as _C
from turbomind.errors import InvalidRequest

# Sampling names of the core (Hugging Face's where there is one) and what each expects.
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
_LEAST = {"max_new_tokens": 1, "logprobs": 0}  # below is the core's own word for None
REQUEST = {
    "priority": "an integer of 32 bits, lower is served first",
    "retention_priority": "a number",
    "salt": "a text",
    "exact": "True or False",
}


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """InvalidRequest for the first name that is not known, listing those that are."""
    known = list(known)
    for name in given:
        if name not in known:
            raise InvalidRequest(f"unknown {what} {name!r}, expected one of {', '.join(known)}")


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int (numpy's integers are welcome); InvalidRequest outside low to high."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidRequest(f"{name} is {value!r}, expected an integer from {low} to {high}")
    return number


def set_option(target: Any, name: str, value: Any, expected: str) -> None:
    """Sets a field of a core struct; InvalidRequest when the core does not take the value."""
    now = getattr(target, name)  # tells the field's type
    try:
        if any(isinstance(value, kind) != isinstance(now, kind) for kind in (bool, str)):
            raise TypeError
        if isinstance(now, int) and not isinstance(now, bool):
            value = operator.index(value)
        setattr(target, name, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name} is {value!r}, expected {expected}") from error


def retention_priority_of(value: float) -> float:
    """How much pages are worth keeping, checked."""
    options = _C.HandleOptions()
    set_option(options, "retention_priority", value, REQUEST["retention_priority"])
    return options.retention_priority


def sampling_params(
    given: Mapping[str, Any], eos_token_ids: Sequence[int]
) -> tuple[_C.SamplingParams, int]:
    """(the core's struct, the effective seed). None means the default; no seed draws one."""
    params = _C.SamplingParams()
    params.eos_token_ids = list(eos_token_ids)
    for name in SAMPLING:
        value: Any = given.get(name)
        if value is None:
            continue
        if name == "logit_bias" and isinstance(value, Mapping):
            value = list(value.items())
        elif name in ("bad_words", "stop_token_ids", "eos_token_ids") and not isinstance(
            value, str
        ):
            try:
                value = list(value)
            except TypeError as error:
                raise InvalidRequest(f"{name} is {value!r}, expected {SAMPLING[name]}") from error
        set_option(params, name, value, SAMPLING[name])
        if name in _LEAST and value < _LEAST[name]:
            raise InvalidRequest(f"{name} is {value!r}, expected {SAMPLING[name]}")
    if given.get("seed") is None:
        params.seed = secrets.randbits(63)
    return params, params.seed


def request_options(given: Mapping[str, Any], kind: str = "generate") -> _C.RequestOptions:
    """The core's struct from `priority`, `retention_priority`, `salt`, `exact`."""
    options = _C.RequestOptions()
    options.kind = kind
    for name, expected in REQUEST.items():
        if given.get(name) is not None:
            set_option(options, name, given[name], expected)
    return options


def token_id_list(token_ids: Iterable[int], vocab: int, name: str = "token_ids") -> list[int]:
    """Token ids as plain ints; InvalidRequest names the first that is no id of the vocabulary."""
    # Sets and mappings have no order that is the caller's.
    if isinstance(token_ids, str | bytes | Set | Mapping) or not isinstance(token_ids, Iterable):
        raise InvalidRequest(
            f"{name} is a {type(token_ids).__name__}, expected a sequence of token ids"
        )
    try:
        ids = [operator.index(i) for i in token_ids]
    except TypeError as error:
        raise InvalidRequest(f"{name} holds a value that is no integer: {error}") from error
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
        raise InvalidRequest(f"{name}[{at}] is {ids[at]}, expected 0 to {vocab - 1}")
    return ids
