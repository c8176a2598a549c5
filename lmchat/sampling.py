"""A model's own sampling settings, in the engine's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbomind.errors import ModelError

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DEFAULT_TOP_K = 50  # what transformers samples from when a model that samples does not say


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for `generate` from a `generation_config.json`; greedy unless it says `do_sample`.

    Raises ModelError for a value that is no number.
    """
    given = {
        name: generation_config[name]
        for name in _NUMBERS
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
