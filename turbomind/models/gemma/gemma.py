"""Gemma 1: norms with a weight of 1 + w, scaled embeddings, a gate of GELU."""

import math
from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.gguf import Architecture

GELU_TANH = (
    "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"
)  # fmt: skip
"""What the reference calls the tanh approximation of GELU."""


class Gemma(Family):
    """`attention_bias` puts biases on q, k, v and o."""

    names = {"GemmaForCausalLM": "gemma"}
    gguf = {"gemma": Architecture("GemmaForCausalLM", shifted_norms=True)}

    def activation(self, fields: Fields) -> str:
        """Reads `hidden_act`, whose "gelu" means the tanh approximation in this family alone."""
        fields.choice("hidden_act", (*GELU_TANH, "gelu"), GELU_TANH[0])
        return "gelu_tanh"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", False)
        return replace(layer, qkv_bias=bias, o_bias=bias)

    def ends(self, fields: Fields, model: Description) -> Description:
        """Scales the embeddings and offsets the norms."""
        return replace(model, embed_scale=math.sqrt(model.hidden), norm_offset=1.0)
