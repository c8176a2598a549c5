"""Qwen3 with experts."""

from dataclasses import replace

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.experts.fields import STACKED, read_experts, sparse_layers
from turbomind.models.gguf import (
    EXPERT_WIDTH,
    SECTIONS,
    Architecture,
    GgufFile,
    Values,
    check_experts,
    wrong,
)
from turbomind.models.qwen3 import Qwen3
from turbomind.models.rope import MAX_CONTEXT


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the sum of the weights of a token's experts, which is 1 in llama.cpp."""
    check_experts(file, own, values)
    if "moe_intermediate_size" not in values:
        raise wrong(file, "expert_feed_forward_length", "a number")
    values["norm_topk_prob"] = True


class Qwen3Moe(Qwen3):
    """Experts in each `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""

    names = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    gguf = {
        name: Architecture(
            "Qwen3MoeForCausalLM", fields=EXPERT_WIDTH, harmless=harmless, complete=_complete
        )
        for name, harmless in (("qwen3moe", ()), ("qwen3vlmoe", SECTIONS))
    }
    modules = STACKED

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Reads the experts, and which layers have an MLP instead."""
        renormalize = fields.flag("norm_topk_prob", False)
        experts = read_experts(fields, 128, "moe_intermediate_size", renormalize)
        return sparse_layers(fields, layer, replace(layer, intermediate=0, experts=experts), layers)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window`, which is for all layers."""
        on = fields.flag("use_sliding_window", False)
        window = fields.integer("sliding_window", 0, MAX_CONTEXT, 0)
        return layer_windows(fields, layers, window if on else 0, 0)
