"""Gemma 1: norms with a weight of 1 + w, scaled embeddings, a gate of GELU."""

import math
from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer


class Gemma(Family):
    """`attention_bias` puts biases on q, k, v and o."""

    names = {"GemmaForCausalLM": "gemma"}
    defaults = {
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    }

    def activation(self, fields: Fields) -> str:
        """Reads `hidden_act`, whose "gelu" means the tanh approximation in this family alone."""
        names = ("gelu_pytorch_tanh", "gelu")
        fields.choice("hidden_activation", names, names[0])  # newer files have both
        fields.choice("hidden_act", names, names[0])
        return "gelu_tanh"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", False)
        return replace(layer, qkv_bias=bias, o_bias=bias)

    def ends(self, fields: Fields, model: Description) -> Description:
        """Scales the embeddings and offsets the norms."""
        return replace(model, embed_scale=math.sqrt(model.hidden), norm_offset=1.0)
