"""The inputs of the model as prompts and generation settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from lmchat.generation.settings import SETTINGS, DefaultLimit
from lmchat.server.config import Limits
from lmchat.server.dialects.limits import check_limits
from lmchat.server.errors import HttpError, refusal
from turbomind.shown import shown

DEFAULT_MAX_TOKENS = 16
"""Longest reply without a setting, as in vLLM's sampling parameters."""

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""Inputs of the model and their data types. All but `text_input` are optional."""

_EXTRA = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
_FLAGS = ("stream", "exclude_input_in_output", *_EXTRA)
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
_SETTINGS = frozenset({*SETTINGS, *_NAMES}) - {"logprobs", "n"}
_TEXTS = frozenset({"stop", "stop_strings", "bad_words"})
_MOST_SETTINGS = 64
MAX_NESTED = 64 << 10
"""Most characters of JSON inside of JSON, which is parsed on the event loop."""


@dataclass(frozen=True)
class PromptRequest:
    """Prompts to continue.

    Attributes:
        prompts: the texts.
        settings: generation settings by the names of `GenerationSettings`.
        stream: whether the reply is streamed.
        with_prompt: whether the prompt precedes the reply in `text_output`.
        extra: further outputs that were asked for.
        fields: the client's names of settings that it names otherwise.
    """

    prompts: tuple[str, ...]
    settings: dict[str, Any]
    stream: bool
    with_prompt: bool
    extra: tuple[str, ...]
    fields: Mapping[str, str]


def prompt_request(
    inputs: Mapping[str, list[Any]], parameters: Mapping[str, Any], limits: Limits
) -> PromptRequest:
    """Returns the request that inputs and parameters describe.

    Args:
        inputs: flat values by input.
        parameters: settings; they override those of the input `sampling_parameters`.
        limits: bounds.

    Raises:
        HttpError: an input or setting is unknown, missing or out of bounds.
    """
    for name in inputs:
        if name not in INPUTS:
            expected = ", ".join(INPUTS)
            raise HttpError(400, f"unknown input {name!r}, expected one of {expected}", param=name)
    prompts = inputs.get("text_input", [])
    if not prompts:
        raise HttpError(400, "text_input is missing, expected a string", param="text_input")
    if len(prompts) > limits.prompts:
        raise HttpError(400, f"{len(prompts)} prompts are given, expected at most {limits.prompts}")
    parameters = dict(parameters)
    flags = {name: _flag(name, inputs, parameters) for name in _FLAGS}
    fields: dict[str, str] = {}
    settings = {**_sampling_parameters(inputs, fields), **_settings(parameters, fields)}
    settings.setdefault("max_new_tokens", DefaultLimit(DEFAULT_MAX_TOKENS))
    check_limits(settings, limits, fields)
    if flags["return_cumulative_logprob"]:
        settings["logprobs"] = 0
    stream = bool(flags["stream"])
    if stream and flags["exclude_input_in_output"] is False:
        raise HttpError(400, "exclude_input_in_output is false, expected true with stream")
    return PromptRequest(
        prompts=tuple(prompts),
        settings=settings,
        stream=stream,
        with_prompt=not stream and not flags["exclude_input_in_output"],
        extra=tuple(output for flag, output in _EXTRA.items() if flags[flag]),
        fields={"prompt": "text_input", **fields},
    )


def _flag(name: str, inputs: Mapping[str, list[Any]], parameters: dict[str, Any]) -> bool | None:
    values = [*inputs.get(name, ())]
    if name in parameters:
        values.append(parameters.pop(name))
    for value in values:
        if not isinstance(value, bool):
            raise refusal(name, shown(value), "true or false")
    return values[-1] if values else None


def _sampling_parameters(inputs: Mapping[str, list[Any]], fields: dict[str, str]) -> dict[str, Any]:
    given = inputs.get("sampling_parameters") or ["{}"]
    if len(given) > 1:
        raise HttpError(400, "sampling_parameters has several values, expected one")
    found = given[0]
    if isinstance(found, str):
        if len(found) > MAX_NESTED:  # its values are not counted as those of the body are
            raise HttpError(
                413,
                f"sampling_parameters has {len(found)} characters, expected at most {MAX_NESTED}",
                param="sampling_parameters",
                code="too_many_values",
            )
        try:
            found = from_json(found, allow_inf_nan=False) if found else {}
        except ValueError as error:
            raise HttpError(400, "sampling_parameters is not JSON", code="invalid_json") from error
    if not isinstance(found, dict):
        raise refusal("sampling_parameters", shown(found), "an object")
    _check_number(found)
    return _settings({k: v if k in _TEXTS else _spelled(v) for k, v in found.items()}, fields)


def _spelled(value: Any) -> Any:
    """Returns the number or truth value that a text spells: clients of Triton send texts here."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and len(value) < 32:
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _settings(given: Mapping[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """Returns the settings by their names here, and adds the client's names to `fields`."""
    _check_number(given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _SETTINGS:
            raise HttpError(400, f"parameter {name[:100]!r} is not supported", param=name[:100])
        if value is not None:
            setting = _NAMES.get(name, name)
            found[setting], fields[setting] = value, name
    return found


def _check_number(given: Mapping[str, Any]) -> None:
    if len(given) > _MOST_SETTINGS:
        raise HttpError(400, f"{len(given)} parameters, expected at most {_MOST_SETTINGS}")
