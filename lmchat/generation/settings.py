"""Settings of a generation: names, ranges, and precedence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from lmchat.errors import InvalidRequest, ModelError
from turbomind.params import (
    MOST_ENTRIES,
    SAMPLING,
    bias_of,
    check_count,
    check_ids,
    check_range,
    check_words,
    ids_of,
    integer_of,
    items_of,
    number_of,
    refuse_unknown,
    sampling_params,
    wrong,
)
from turbomind.shown import shown

MINUS_INFINITY = "-Infinity"
"""A bias that excludes a token, as JSON has it: a string, since its numbers are finite."""

SETTINGS: dict[str, str] = {
    "max_new_tokens": "longest reply in tokens",
    "min_new_tokens": "tokens before the reply may end",
    "do_sample": "off: always the most likely token",
    "temperature": "how evenly tokens are sampled; 0: always the most likely one",
    "top_k": "sample from the k most likely tokens; 0: from all",
    "top_p": "sample from the most likely tokens that together have this probability",
    "min_p": "drop tokens under this part of the most likely one's probability",
    "repetition_penalty": "above 1: tokens of the conversation become less likely",
    "presence_penalty": "taken from the logit of tokens that the reply has",
    "frequency_penalty": "taken from a token's logit for each time the reply has it",
    "logit_bias": "added to logits, by token id",
    "bad_words": "sequences of token ids that are never produced",
    "stop_strings": "texts that end the reply; they are cut off",
    "stop_token_ids": "more tokens that end the reply",
    "eos_token_ids": "tokens that end the reply, in place of the model's",
    "ignore_eos": "on: continue after the model's end token",
    "seed": "makes the sampling repeatable",
    "exact": "on: compute again what another kind of machine has computed",
    "logprobs": "log-probabilities of the k most likely tokens beside the reply's",
}
"""All settings and their descriptions. The names are those of Hugging Face where it has one."""

STATELESS_SETTINGS: dict[str, str] = {
    **SETTINGS,
    "n": "number of choices",
    "skip_special_tokens": "off: special tokens in the reply are spelled out",
}
"""The settings of a generation without a session, and their descriptions."""


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
    """Drop tokens under this fraction of the most likely token's probability, 0 to 1. Default:
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
    """Added to logits, by token id, at most 16,384; -inf excludes a token. Default: nothing."""
    bad_words: Sequence[Sequence[int]] | None
    """Sequences of token ids that are never produced, at most 4,096 of 1 to 256 tokens. Default:
    none."""
    stop_strings: str | Sequence[str] | None
    """Texts that end the reply; they are cut off. Special tokens in a reply, which show nothing,
    count where a text spells them. At most 256 of 1 to 4,096 characters. Default: none."""
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


class StatelessSettings(GenerationSettings, total=False):
    """The keywords of one generation without a session: those of `GenerationSettings`, and two
    that a session refuses."""

    n: int | None
    """Number of choices: replies to the same prompt, which is computed once, 1 to 256. Each samples
    tokens of its own, and ends by itself. A session refuses it, because its reply has one choice.
    Default: 1."""
    skip_special_tokens: bool | None
    """False: special tokens in the reply are spelled out, except those that end it and those of
    reasoning markers. Default: True."""


_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "logprobs", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty")  # fmt: skip
_FLAGS = ("do_sample", "ignore_eos", "exact", "skip_special_tokens")
_ID_LISTS = ("stop_token_ids", "eos_token_ids")
MOST_STOPS = 256
MOST_STOP_CHARACTERS = 4_096
"""Most stop strings, and the length of each: every token of a reply is searched for them."""

_SAMPLING_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50  # the default of transformers if do_sample is set


class DefaultLimit(int):
    """A `max_new_tokens` that nobody asked for, such as the default of a protocol. It is cut to the
    room that the context has left."""


@dataclass(frozen=True)
class Effective:
    """The settings that apply to one generation.

    Attributes:
        params: keywords for the engine, including `seed` and `attempt`.
        stop_strings: texts that end the reply.
        skip_special_tokens: whether special tokens in the reply show nothing.
        stored: all settings, given or sampled, to store with the turn. They reproduce the
            generation.
        limit_given: whether `max_new_tokens` is the caller's or the session's. Otherwise it is a
            default, which is cut to the room in the context.
    """

    params: dict[str, Any]
    stop_strings: tuple[str, ...]
    stored: dict[str, Any]
    skip_special_tokens: bool = True
    limit_given: bool = False

    def hidden_tokens(self, end_tokens: Collection[int]) -> frozenset[int] | None:
        """Returns the special tokens that show nothing, for `ReplyParser`; None: all.

        Args:
            end_tokens: the model's end tokens.
        """
        if self.skip_special_tokens:
            return None
        params = self.params
        ends = [] if params.get("ignore_eos") else params.get("eos_token_ids", end_tokens)
        return frozenset([*ends, *params.get("stop_token_ids", ())])


def validate(
    settings: Mapping[str, Any], *, stateless: bool = False, vocab: int | None = None
) -> dict[str, Any]:
    """Returns the settings as plain values, without those that are None.

    Args:
        settings: values by the names of settings.
        stateless: whether they are for a generation without a session.
        vocab: size of the vocabulary, for the check of token ids. None: the engine checks them.

    Raises:
        InvalidRequest: names the setting, its value and the expected one.
    """
    if not stateless:
        settings = _of_a_session(settings)
    refuse_unknown("setting", settings, STATELESS_SETTINGS if stateless else SETTINGS)
    given = {name: _plain(name, value) for name, value in settings.items() if value is not None}
    # The core's struct has smaller integers and floats.
    sampling_params({name: value for name, value in given.items() if name in SAMPLING}, ())
    for name in MOST_ENTRIES:
        if name in given:
            biases = name == "logit_bias"
            sent = zip(given[name], settings[name].values(), strict=True) if biases else ()
            check_ids(name, dict(sent) if biases else given[name], vocab)
    if given.get("do_sample") and given.get("temperature") == 0:
        raise wrong("do_sample", True, "False, or a temperature above 0")
    return given


def check_length(settings: Mapping[str, Any], max_context: int) -> None:
    """Refuses lengths that every reply of this model would refuse.

    Args:
        settings: settings as `validate()` returns them.
        max_context: most tokens of prompt and reply together.

    Raises:
        InvalidRequest: names the setting, its value and the expected one.
    """
    for name in ("max_new_tokens", "min_new_tokens"):
        if settings.get(name, 0) >= max_context:
            expected = f"less than {max_context}, the longest context of this model"
            raise wrong(name, settings[name], expected)


def _of_a_session(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a session, without those for other generations that are None."""
    found = dict(settings)
    n, skip = found.pop("n", None), found.pop("skip_special_tokens", None)
    if n is not None:
        raise wrong(
            "n",
            n,
            "to be left out in a session, whose replies have one choice: use "
            "ChatEngine.generate(), or retry() for another reply",
        )
    if skip is not None:
        raise wrong(
            "skip_special_tokens",
            skip,
            "to be left out in a session: read Reply.token_ids for the special tokens",
        )
    return found


def merge(
    call: Mapping[str, Any],
    session: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    attempt: int = 0,
    stateless: bool = False,
    vocab: int | None = None,
) -> Effective:
    """Merges the settings: the call's override the session's, which override the model's.

    None means "not given". `stateless` is as in `validate()`, and `vocab`, for the call's settings:
    a session that was stored with others opens. `do_sample=False` is temperature 0. A temperature
    samples even if a lower layer is greedy. Without a seed, a random one is chosen.

    Raises:
        InvalidRequest: a value is out of range, or values contradict each other.
    """
    found = dict(model)
    for layer in (validate(session), validate(call, stateless=stateless, vocab=vocab)):
        sample = layer.pop("do_sample", None)
        if sample is False:
            layer["temperature"] = 0.0
        elif sample and layer.get("temperature", found.get("temperature")) == 0:
            layer["temperature"] = 1.0
        found |= layer
    most, least = found.get("max_new_tokens"), found.get("min_new_tokens", 0)
    if most is not None and least > most:
        raise wrong("min_new_tokens", least, f"at most {most}, the most tokens to generate")
    stops = tuple(found.pop("stop_strings", ()))
    skip = bool(found.pop("skip_special_tokens", True))
    found["attempt"] = attempt
    found["seed"] = sampling_params(found, ())[1]
    stored = {**found, "stop_strings": list(stops)} if stops else dict(found)
    limits = [layer.get("max_new_tokens") for layer in (call, session)]
    limit = next((one for one in limits if one is not None), None)
    given = limit is not None and not isinstance(limit, DefaultLimit)
    return Effective(found, stops, stored, skip, given)


def effective(stored: Mapping[str, Any]) -> Effective:
    """Returns the settings of an earlier generation, from those stored with its turn."""
    found = {name: value for name, value in stored.items() if name in (*SETTINGS, "attempt")}
    stops = tuple(found.pop("stop_strings", ()))
    return Effective(found, stops, dict(stored))


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keywords for `generate` from a `generation_config.json`: greedy unless it sets
    `do_sample`.

    Raises:
        ModelError: a value is no number.
    """
    given = {
        name: generation_config[name]
        for name in _SAMPLING_NUMBERS
        if generation_config.get(name) is not None
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"generation_config.json: {name} is {shown(value)}, expected a number")
    if generation_config.get("do_sample"):
        return {"top_k": _DEFAULT_TOP_K, **given}
    greedy: dict[str, Any] = {"temperature": 0.0}
    if "repetition_penalty" in given:
        greedy["repetition_penalty"] = given["repetition_penalty"]
    return greedy


def from_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a model's `generation_config.json`.

    Settings of Hugging Face without a meaning here (beams, caches, ...) are ignored. The engine
    reads the end tokens.

    Raises:
        ModelError: a value is out of range.
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


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as JSON has them: it lacks the integer keys and infinities of a bias.

    A bias of -inf is MINUS_INFINITY there, which `validate` reads.
    """
    found = dict(settings)
    bias = found.get("logit_bias")
    if isinstance(bias, Mapping):
        found["logit_bias"] = {
            str(i): MINUS_INFINITY if isinstance(b, float) and b == -math.inf else b
            for i, b in bias.items()
        }
    return found


def _plain(name: str, value: Any) -> Any:
    """Returns the value as plain Python of the setting's type."""
    check_count(name, value)
    expected = SAMPLING.get(name, "True or False")
    try:
        if name == "stop_strings":
            return _stop_strings(value)
        if name in _FLAGS:
            return _flag(value)
        if name in _INTEGERS or name in _NUMBERS:
            number = integer_of(value) if name in _INTEGERS else number_of(value)
            check_range(name, number, value)
            return number
        if name in _ID_LISTS:
            return ids_of(value)
        if name == "bad_words":
            return _words(value)
        return {integer_of(_key(i)): _bias(i, bias) for i, bias in value.items()}  # logit_bias
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise wrong(name, value, expected) from error


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _words(value: Any) -> list[list[int]]:
    words = [ids_of(word) for word in items_of(value)]
    check_words(words)
    return words


def _key(value: Any) -> Any:
    return int(value) if isinstance(value, str) else value  # JSON has only text keys


def _bias(token: Any, value: Any) -> float:
    if isinstance(value, str) and value == MINUS_INFINITY:
        return -math.inf
    return bias_of(token, value)


def _stop_strings(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(items_of(value))
    if len(texts) > MOST_STOPS:
        raise wrong("stop_strings", texts, f"at most {MOST_STOPS}", seen=f"{len(texts)} entries")
    for i, text in enumerate(texts):
        place = "stop_strings" if isinstance(value, str) else f"stop_strings[{i}]"
        if not isinstance(text, str) or not text:
            raise wrong(place, text, "a string that is not empty")
        if len(text) > MOST_STOP_CHARACTERS:
            most, seen = MOST_STOP_CHARACTERS, f"{len(text)} characters"
            raise wrong(place, text, f"at most {most}", seen=seen)
    return texts
