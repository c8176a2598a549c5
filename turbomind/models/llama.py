"""Llama 2, 3, 3.1, 3.2 and the many models saved under their name."""

from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Layer


class Llama(Family):
    """`attention_bias` puts biases on q, k, v and o; `mlp_bias` on the three MLP projections."""

    names = {"LlamaForCausalLM": "llama"}

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads both bias flags."""
        bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
