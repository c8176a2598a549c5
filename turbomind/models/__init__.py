"""The supported model families, one file of wiring each, and the readers of their configs.

Not here: the arithmetic (`cpp/model`), reading of weights (`turbomind.loading`) and how quantized
checkpoints store codes (`turbomind.quant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbomind.errors import ModelError
from turbomind.models.base import Family
from turbomind.models.description import Description, Experts, Layer, Rows
from turbomind.models.experts.gpt_oss import GptOss
from turbomind.models.experts.granite_moe import GraniteMoe
from turbomind.models.experts.mixtral import Mixtral
from turbomind.models.experts.olmoe import Olmoe
from turbomind.models.experts.qwen2_moe import Qwen2Moe
from turbomind.models.experts.qwen3_moe import Qwen3Moe
from turbomind.models.experts.qwen3_vl_moe import Qwen3VLMoe
from turbomind.models.gemma.gemma import Gemma
from turbomind.models.gemma.gemma2 import Gemma2
from turbomind.models.gemma.gemma3 import Gemma3
from turbomind.models.gemma.gemma4 import Gemma4
from turbomind.models.gemma.gemma4_unified import Gemma4Unified
from turbomind.models.granite import Granite
from turbomind.models.internlm2 import InternLM2
from turbomind.models.llama import Llama
from turbomind.models.mistral import Mistral
from turbomind.models.phi3 import Phi3
from turbomind.models.quantization import QUANT_METHODS, Quantization, quantization_of
from turbomind.models.qwen2 import Qwen2, Qwen2_5VL
from turbomind.models.qwen3 import Qwen3, Qwen3VL
from turbomind.models.smollm3 import SmolLM3

FAMILIES: tuple[type[Family], ...] = (
    Llama, Mistral, Qwen2, Qwen3, InternLM2, Phi3, SmolLM3, Granite, Qwen2_5VL, Qwen3VL,
    Gemma, Gemma2, Gemma3, Gemma4, Gemma4Unified, Qwen2Moe, Qwen3Moe, Qwen3VLMoe, Mixtral, Olmoe,
    GraniteMoe, GptOss
)  # fmt: skip

__all__ = [
    "FAMILIES", "QUANT_METHODS", "Description", "Experts", "Family", "Layer", "Quantization",
    "Rows", "family_of",
]  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """Returns the family of a `config.json`, by `architectures` or, if absent, by `model_type`.

    Supported families ignore `auto_map`; code from a checkpoint never runs.

    Raises:
        ModelError: The architecture is not supported, or the checkpoint is quantized.
    """
    listed = config.get("architectures")
    if listed is not None and not (
        isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], str)
    ):
        raise ModelError(f"config.json: architectures is {listed!r}, expected a list of one name")
    kind = config.get("model_type")
    for family, architecture, model_type in _names():
        if kind == model_type if listed is None else listed[0] == architecture:
            if kind is not None and kind != model_type:
                raise ModelError(
                    f"config.json: model_type is {kind!r}, expected {model_type!r} "
                    f"for {architecture}"
                )
            quantization_of(config)
            return family(architecture)
    raise _unsupported(listed[0] if listed else f"model_type {kind!r}", config)


def _names() -> list[tuple[type[Family], str, str]]:
    """Returns each family with its architectures and their `model_type`."""
    return [
        (family, *pair)
        for family in FAMILIES
        for pair in (
            *family.names.items(),
            *((name, wrapper.model_type) for name, wrapper in family.wrappers.items()),
        )
    ]


def _unsupported(name: str, config: Mapping[str, Any]) -> ModelError:
    known = ", ".join(architecture for _, architecture, _ in _names())
    message = f"config.json: architecture {name} is not supported, expected one of {known}"
    if config.get("auto_map") is not None:
        message += "; its auto_map names code of the checkpoint, which is never run"
    return ModelError(message)
