"""Models that wrap a language model: beside it they have encoders of images, video or sound.

Only the language model is loaded. Here its fields are found in the config, and its tensors among
those of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbomind.errors import ModelError

_ENCODER_CONFIG = re.compile(r"(vision|audio|speech)_config")
_ENCODER_FIELD = re.compile(
    r"(vision|image|video|audio|speech|boi|eoi|boa|eoa|mm|multimodal|projector|spatial)_.*"
)
_ENCODER_TENSOR = re.compile(
    r"(model\.)?(visual|(vision|audio)_tower|vision_model|multi_modal_projector|embed_(vision|audio)|vision_embedder)"
    r"\..*"
)
_LANGUAGE = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of tensors begin in checkpoints, and in those of the language model alone."""

_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
"""Fields at either level; the outer one wins."""


@dataclass(frozen=True)
class Wrapper:
    """How a wrapping model refers to its language model.

    Attributes:
        model_type: Of the wrapping config.
        text_type: The `model_type` of its `text_config`.
        flat: The fields of the language model may be beside those of the encoders.
        outer_tie: `tie_word_embeddings` counts in the wrapping config alone.
    """

    model_type: str
    text_type: str
    flat: bool = False
    outer_tie: bool = False

    def text_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of the language model, as in a config of it alone.

        Raises:
            ModelError: The config has no language model.
        """
        text = values.get("text_config")
        if text is None and self.flat and "hidden_size" in values:
            return {
                name: value for name, value in values.items() if not _ENCODER_FIELD.fullmatch(name)
            }
        if not isinstance(text, dict):
            raise ModelError(
                f"config.json: text_config is {text!r}, expected an object: the fields of the "
                f"language model of this {self.model_type}"
            )
        kind = text.get("model_type")
        if kind is not None and kind != self.text_type:
            raise ModelError(
                f"config.json: text_config: model_type is {kind!r}, expected {self.text_type!r}"
            )
        fields = dict(text)
        for name in _SHARED:
            if values.get(name) is not None:
                fields[name] = values[name]
        if self.outer_tie:
            return fields | {"tie_word_embeddings": _tie(values)}
        ties = [v for v in map(_tie, (values, text)) if v is not None]
        if ties:
            fields["tie_word_embeddings"] = True if any(v is True for v in ties) else ties[0]
        return fields


def _tie(values: Mapping[str, Any]) -> Any:
    return values.get("tie_word_embeddings")


def encoders(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what the encoders of a config are of: "vision", "audio"."""
    return tuple(
        name.removesuffix("_config")
        for name, value in values.items()
        if _ENCODER_CONFIG.fullmatch(name) and value is not None
    )


def language_tensor(name: str) -> str | None:
    """Returns the name that a tensor has in a checkpoint of the language model alone, None for a
    tensor of an encoder."""
    if _ENCODER_TENSOR.fullmatch(name):
        return None
    for prefix, short in _LANGUAGE.items():
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name
