"""Settings of a generation: names, ranges, and precedence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lmchat.errors import InvalidRequest, ModelError
from turbomind.params import (
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
from turbomind.settings import (
    CHOICES,
    EXACT,
    MOST_ENTRIES,
    SAMPLING,
    Setting,
    TokenSettings,
    document,
    kinds_of,
    rows_of,
)
from turbomind.shown import shown

MINUS_INFINITY = "-Infinity"
"""A bias that excludes a token, as JSON has it: a string, since its numbers are finite."""


class GenerationSettings(TokenSettings, total=False):
    """The keywords of one generation, all optional.

    None means "not given": a call's settings come before the session's, and those before the
    model's `generation_config.json`. Values out of range raise InvalidRequest. The defaults named
    here apply where none of the three gives a value.
    """

    do_sample: Annotated[
        bool | None,
        Setting(
            "off: always the most likely token",
            "True or False",
            "see `temperature`",
            more="False is `temperature=0`.",
        ),
    ]
    stop_strings: Annotated[
        str | Sequence[str] | None,
        Setting(
            "texts that end the reply; they are cut off",
            "a text or a list of texts, none of them empty",
            "none",
            more="Special tokens in a reply, which show nothing, count where a text spells them. "
            "At most 256 of 1 to 4,096 characters.",
        ),
    ]
    exact: Annotated[bool | None, EXACT]


class StatelessSettings(GenerationSettings, total=False):
    """The keywords of one generation without a session: those of `GenerationSettings`, and two
    that a session refuses."""

    n: Annotated[int | None, CHOICES]
    skip_special_tokens: Annotated[
        bool | None,
        Setting(
            "off: special tokens in the reply are spelled out",
            "True or False",
            "on",
            more="Those that end it and those of reasoning markers are not.",
        ),
    ]


for _class in (GenerationSettings, StatelessSettings):
    document(_class, sessions=True)

ROWS = rows_of(StatelessSettings)
"""The row of each setting."""
SETTINGS = {name: row.text for name, row in rows_of(GenerationSettings).items()}
"""All settings of a session and their descriptions."""
STATELESS_SETTINGS = {name: row.text for name, row in ROWS.items()}
"""The settings of a generation without a session, and their descriptions."""
_KINDS = kinds_of(StatelessSettings)
MOST_STOPS = 256
MOST_STOP_CHARACTERS = 4_096
"""Most stop strings, and the length of each: every token of a reply is searched for them."""

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
        for name, row in ROWS.items()
        if row.of_model and generation_config.get(name) is not None
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
    kind = _KINDS[name]
    try:
        if name == "stop_strings":
            return _stop_strings(value)
        if kind is bool:
            return _flag(value)
        if kind is not None:
            number = integer_of(value) if kind is int else number_of(value)
            check_range(name, number, value)
            return number
        if name == "bad_words":
            return _words(value)
        if name == "logit_bias":
            return {integer_of(_key(i)): _bias(i, bias) for i, bias in value.items()}
        return ids_of(value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise wrong(name, value, ROWS[name].expected) from error


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
