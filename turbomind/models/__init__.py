"""The supported model families, one file of wiring each, and the readers of their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbomind.errors import ModelError
from turbomind.models.base import Description, Family, Layer, Rows
from turbomind.models.internlm2 import InternLM2
from turbomind.models.llama import Llama
from turbomind.models.mistral import Mistral
from turbomind.models.qwen2 import Qwen2
from turbomind.models.qwen3 import Qwen3

FAMILIES: tuple[type[Family], ...] = (Llama, Mistral, Qwen2, Qwen3, InternLM2)

__all__ = ["FAMILIES", "Description", "Family", "Layer", "Rows", "family_of"]


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`, by `architectures` or, if absent, by `model_type`.

    Supported families ignore `auto_map`; code from a checkpoint never runs.

    Raises:
        ModelError: The architecture is not supported, or the checkpoint is quantized.
    """
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    ):
        raise ModelError(f"config.json: architectures is {names!r}, expected a list of one name")
    kind = config.get("model_type")
    for family in FAMILIES:
        if names is None and kind == family.model_type:
            break
        if names is not None and names[0] == family.architecture:
            if kind is not None and kind != family.model_type:
                raise ModelError(
                    f"config.json: model_type is {kind!r}, expected {family.model_type!r} "
                    f"for {family.architecture}"
                )
            break
    else:
        raise _unsupported(names[0] if names else f"model_type {kind!r}", config)
    for field in ("quantization_config", "compression_config"):
        if config.get(field) is not None:
            raise _quantized(field, config[field])
    return family()


def _unsupported(name: str, config: Mapping[str, Any]) -> ModelError:
    known = ", ".join(family.architecture for family in FAMILIES)
    message = f"config.json: architecture {name} is not supported, expected one of {known}"
    if config.get("auto_map") is not None:
        message += "; its auto_map names code of the checkpoint, which is never run"
    return ModelError(message)


def _quantized(field: str, value: Any) -> ModelError:
    method = value.get("quant_method", "unnamed") if isinstance(value, dict) else value
    return ModelError(
        f"config.json: {field} has quantized weights ({method}), "
        "expected a bfloat16, float16 or float32 checkpoint"
    )
