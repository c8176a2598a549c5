"""Settings of a generation: their names, their values, and which of several applies."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from lmchat.errors import InvalidRequest, ModelError
from turbomind.params import SAMPLING, refuse_unknown, sampling_params

SETTINGS: dict[str, str] = {
    "max_new_tokens": "longest reply in tokens",
    "min_new_tokens": "tokens before the reply may end",
    "do_sample": "off: always the most likely token",
    "temperature": "how evenly tokens are drawn; 0: always the most likely one",
    "top_k": "draw from the k most likely tokens; 0: from all",
    "top_p": "draw from the most likely tokens that together have this probability",
    "min_p": "drop tokens below this part of the most likely one's probability",
    "repetition_penalty": "above 1: tokens of the conversation become less likely",
    "presence_penalty": "taken from the logit of tokens that the reply has",
    "frequency_penalty": "taken from a token's logit for each time the reply has it",
    "logit_bias": "added to logits, by token id",
    "bad_words": "sequences of token ids that are never produced",
    "stop_strings": "texts that end the reply; they are cut off",
    "stop_token_ids": "more tokens that end the reply",
    "eos_token_ids": "tokens that end the reply, in place of the model's",
    "ignore_eos": "on: go on after the model's end token",
    "seed": "makes the drawing repeatable",
    "exact": "on: compute again what another kind of machine has computed",
    "logprobs": "log-probabilities of the k most likely tokens beside the reply's",
}
"""All settings and what each does. The names are Hugging Face's where it has one."""


class GenerationSettings(TypedDict, total=False):
    """The keywords of one generation, all optional.

    None means "not given": a call's settings come before the session's, and those before the
    model's `generation_config.json`. Values out of range raise InvalidRequest. The defaults named
    here apply where none of the three gives a value.
    """

    max_new_tokens: int | None
    """Longest reply, in tokens, at least 1. Default: up to the end of the context."""
    min_new_tokens: int | None
    """Tokens before the reply may end, at least 0 and at most `max_new_tokens`. Default: 0."""
    do_sample: bool | None
    """False: always the most likely token, as `temperature=0`. Default: see `temperature`."""
    temperature: float | None
    """Divisor of the logits, at least 0; 0: always the most likely token. Default: that of the
    model, which is 0 unless its configuration samples."""
    top_k: int | None
    """Sample from this many most likely tokens, at least 0; 0: from all. Default: 50 for a model
    whose configuration samples without naming one, else 0."""
    top_p: float | None
    """Sample from the most likely tokens that together have this probability, above 0, at most 1.
    Default: 1."""
    min_p: float | None
    """Drop tokens below this fraction of the most likely token's probability, 0 to 1. Default:
    0."""
    repetition_penalty: float | None
    """Divides positive and multiplies negative logits of tokens of the conversation, above 0.
    Default: 1."""
    presence_penalty: float | None
    """Subtracted from the logit of each token that the reply has, any finite number. Default: 0."""
    frequency_penalty: float | None
    """Subtracted from a token's logit for each time the reply has it, any finite number. Default:
    0."""
    logit_bias: Mapping[int, float] | None
    """Added to logits, by token id; -inf excludes a token. Default: nothing."""
    bad_words: Sequence[Sequence[int]] | None
    """Sequences of token ids that are never produced. Default: none."""
    stop_strings: str | Sequence[str] | None
    """Texts that end the reply; they are cut off. Default: none."""
    stop_token_ids: Sequence[int] | None
    """Token ids that end the reply, beside the end tokens. Default: none."""
    eos_token_ids: Sequence[int] | None
    """Token ids that end the reply in place of the model's. Default: those of the model."""
    ignore_eos: bool | None
    """True: continue after the model's end token. Default: False."""
    seed: int | None
    """Seed of the sampling, 0 to 2**64 - 1. Default: a random one, which the turn records."""
    exact: bool | None
    """True: compute KV again that another kind of machine has computed. Default: False."""
    logprobs: int | None
    """Log-probabilities of this many most likely tokens, beside those of the reply, 0 to 256.
    Default: none at all, not those of the reply either."""


_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty")  # fmt: skip
_FLAGS = ("do_sample", "ignore_eos", "exact")
_ID_LISTS = ("stop_token_ids", "eos_token_ids")
_LARGEST = 3.4e38  # of the core's 32-bit floats
_MAX_SEED = (1 << 64) - 1
_MOST_LOGPROBS = 256

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: v >= 1, "an integer of at least 1"),
    "min_new_tokens": (lambda v: v >= 0, "an integer of at least 0"),
    "temperature": (lambda v: 0 <= v <= _LARGEST, "a number of at least 0"),
    "top_k": (lambda v: v >= 0, "an integer of at least 0"),
    "top_p": (lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: 0 < v <= _LARGEST, "a number above 0"),
    "presence_penalty": (lambda v: abs(v) <= _LARGEST, "a finite number"),
    "frequency_penalty": (lambda v: abs(v) <= _LARGEST, "a finite number"),
    "seed": (lambda v: 0 <= v <= _MAX_SEED, f"an integer from 0 to {_MAX_SEED}"),
    "logprobs": (lambda v: 0 <= v <= _MOST_LOGPROBS, f"an integer from 0 to {_MOST_LOGPROBS}"),
}

_SAMPLING_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50  # what transformers samples from when a model that samples does not say


@dataclass(frozen=True)
class Effective:
    """The settings that apply to one generation.

    `params` are the engine's keywords, `seed` and `attempt` among them. `stored` are all settings
    that were given or drawn, to be kept with the turn: with them it can be generated again.
    """

    params: dict[str, Any]
    stop_strings: tuple[str, ...]
    stored: dict[str, Any]


def validate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as plain values; those that are None are left out.

    Raises InvalidRequest naming the setting, the value and what was expected. Whether token ids are
    of the vocabulary is left to the engine.
    """
    refuse_unknown("setting", settings, SETTINGS)
    given = {name: _plain(name, value) for name, value in settings.items() if value is not None}
    # What only the core knows about types: sizes of integers, contents of lists.
    sampling_params({name: value for name, value in given.items() if name in SAMPLING}, ())
    for name, (fits, expected) in _RANGES.items():
        if name in given and not fits(given[name]):
            raise _wrong(name, given[name], expected)
    if given.get("do_sample") and given.get("temperature") == 0:
        raise InvalidRequest("do_sample is True with temperature 0, expected one above 0 with it")
    return given


def merge(
    call: Mapping[str, Any],
    session: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    attempt: int = 0,
) -> Effective:
    """What applies: the call's settings over the session's over the model's.

    None means "not given". `do_sample=False` is temperature 0; a temperature samples even where
    what is below it is greedy. Without a seed one is drawn. Raises InvalidRequest.
    """
    found = dict(model)
    for layer in (validate(session), validate(call)):
        sample = layer.pop("do_sample", None)
        if sample is False:
            layer["temperature"] = 0.0
        elif sample and layer.get("temperature", found.get("temperature")) == 0:
            layer["temperature"] = 1.0
        found |= layer
    most, least = found.get("max_new_tokens"), found.get("min_new_tokens", 0)
    if most is not None and least > most:
        raise InvalidRequest(f"min_new_tokens is {least}, expected at most max_new_tokens, {most}")
    stops = tuple(found.pop("stop_strings", ()))
    found["attempt"] = attempt
    found["seed"] = sampling_params(found, ())[1]
    return Effective(found, stops, {**found, "stop_strings": list(stops)} if stops else dict(found))


def effective(stored: Mapping[str, Any]) -> Effective:
    """What applied to a generation, from the settings kept with its turn."""
    found = {name: value for name, value in stored.items() if name in (*SETTINGS, "attempt")}
    stops = tuple(found.pop("stop_strings", ()))
    return Effective(found, stops, dict(stored))


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for `generate` from a `generation_config.json`; greedy unless it says `do_sample`.

    Raises ModelError for a value that is no number.
    """
    given = {
        name: generation_config[name]
        for name in _SAMPLING_NUMBERS
        if generation_config.get(name) is not None
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {name} is {value!r}, expected a number")
    if generation_config.get("do_sample"):
        return {"top_k": _DEFAULT_TOP_K, **given}
    greedy: dict[str, Any] = {"temperature": 0.0}
    if "repetition_penalty" in given:
        greedy["repetition_penalty"] = given["repetition_penalty"]
    return greedy


def from_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a model's `generation_config.json`.

    Those of Hugging Face that mean nothing here (beams, caches, ...) are passed over; end tokens
    are the engine's to read. Raises ModelError for values that cannot be.
    """
    found = sampling_defaults(config)
    for name, here in (
        ("max_new_tokens", "max_new_tokens"),
        ("min_new_tokens", "min_new_tokens"),
        ("stop_strings", "stop_strings"),
        ("bad_words_ids", "bad_words"),
    ):
        if config.get(name) is not None:
            found[here] = config[name]
    try:
        return validate(found)
    except InvalidRequest as error:
        raise ModelError(f"generation_config.json: {error}") from error


def _plain(name: str, value: Any) -> Any:
    """The value as plain Python of the setting's type."""
    expected = _RANGES[name][1] if name in _RANGES else SAMPLING.get(name, "True or False")
    try:
        if name == "stop_strings":
            return _stop_strings(value)
        if name in _FLAGS:
            return _flag(value)
        if name in _INTEGERS:
            return _integer(value)
        if name in _NUMBERS:
            return _number(value)
        if name in _ID_LISTS:
            return _ids(value)
        if name == "bad_words":
            return _words(value)
        return {_integer(_key(i)): _bias(bias) for i, bias in value.items()}  # logit_bias
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _wrong(name, value, expected) from error


def _wrong(name: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r}, expected {expected}")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes) or math.isnan(value):
        raise TypeError
    return float(value)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return list(value)


def _ids(value: Any) -> list[int]:
    return [_integer(i) for i in _items(value)]


def _words(value: Any) -> list[list[int]]:
    words = [_ids(word) for word in _items(value)]
    if not all(words):
        raise ValueError
    return words


def _key(value: Any) -> Any:
    return int(value) if isinstance(value, str) else value  # JSON knows no other keys


def _bias(value: Any) -> float:
    bias = _number(value)
    if bias > _LARGEST:
        raise ValueError
    return bias


def _stop_strings(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(_items(value))
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise _wrong(f"stop_strings[{i}]", text, "a text that is not empty")
    return texts
