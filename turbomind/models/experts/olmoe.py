"""OLMoE: experts in all layers, and norms of q and k across all heads."""

from dataclasses import replace

from turbomind.models.base import Family
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.experts.fields import STACKED, read_experts
from turbomind.models.gguf import Architecture, check_experts


class Olmoe(Family):
    """`attention_bias` puts biases on q, k, v and o."""

    names = {"OlmoeForCausalLM": "olmoe"}
    gguf = {"olmoe": Architecture("OlmoeForCausalLM", complete=check_experts)}
    modules = STACKED

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", False)
        return replace(layer, qk_norm_all=True, qkv_bias=bias, o_bias=bias)

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the same experts for all layers."""
        renormalize = fields.flag("norm_topk_prob", False)
        experts = read_experts(fields, 64, "intermediate_size", renormalize)
        return [replace(layer, intermediate=0, experts=experts)] * layers
