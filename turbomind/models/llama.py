"""Llama 2, 3, 3.1, 3.2 and the many models saved under their name."""

from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.gguf import DIVISORS, Architecture, GgufFile, Values, check_experts


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Reads a Llama with experts as a Mixtral."""
    if values.get("num_experts"):
        check_experts(file, own, values)
        values["architectures"] = ["MixtralForCausalLM"]


class Llama(Family):
    """`attention_bias` puts biases on q, k, v and o; `mlp_bias` on the three MLP projections."""

    names = {"LlamaForCausalLM": "llama"}
    gguf = {
        "llama": Architecture(
            "LlamaForCausalLM", interleaved=True, tables=(DIVISORS,), complete=_complete
        )
    }

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads both bias flags."""
        bias = fields.flag("attention_bias", False)
        mlp_bias = fields.flag("mlp_bias", False)
        return replace(layer, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
