"""Llama 2, 3, 3.1, 3.2 and the many models saved under their name."""

from dataclasses import replace

from turbomind.models.base import Family, Layer
from turbomind.models.config import Fields


class Llama(Family):
    """`attention_bias` puts biases on q, k, v and o; `mlp_bias` on the three MLP projections."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads both bias flags."""
        bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
