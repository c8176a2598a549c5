"""Qwen2 with experts, and an MLP that every token takes beside them."""

from dataclasses import replace

from turbomind.models.base import MAX_WIDTH, layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.experts.fields import STACKED, read_experts, sparse_layers
from turbomind.models.gguf import EXPERT_WIDTH, Architecture, GgufFile, Values, check_experts
from turbomind.models.qwen2 import Qwen2
from turbomind.models.rope import MAX_CONTEXT


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the widths of experts, which early files do not have, and that the weights of a token's
    experts are shares of all, as in llama.cpp."""
    check_experts(file, own, values)
    inner, used = values["intermediate_size"], values["num_experts_per_tok"]
    if isinstance(inner, int) and isinstance(used, int) and used > 0:
        values.setdefault("moe_intermediate_size", inner // used)
    values.setdefault("shared_expert_intermediate_size", inner)
    values["norm_topk_prob"] = False


class Qwen2Moe(Qwen2):
    """`qkv_bias` puts biases on q, k and v; a gate scales the shared expert."""

    names = {"Qwen2MoeForCausalLM": "qwen2_moe"}
    gguf = {
        "qwen2moe": Architecture(
            "Qwen2MoeForCausalLM",
            fields=EXPERT_WIDTH
            | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            bias="qkv_bias",
            complete=_complete,
        )
    }
    modules = STACKED
    mlp_gate = "model.layers.{i}.mlp.shared_expert_gate"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        return replace(layer, qkv_bias=fields.flag("qkv_bias", True))

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Reads the experts, and which layers have an MLP instead."""
        renormalize = fields.flag("norm_topk_prob", False)
        experts = read_experts(fields, 60, "moe_intermediate_size", renormalize)
        shared = fields.integer("shared_expert_intermediate_size", 1, 4 * MAX_WIDTH)
        sparse = replace(layer, intermediate=shared, mlp_gate=True, experts=experts)
        return sparse_layers(fields, layer, sparse, layers)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window` with `layer_types`, else every other layer up to
        `max_window_layers` has the window."""
        on = fields.flag("use_sliding_window", False)
        window = fields.integer("sliding_window", 1 if on else 0, MAX_CONTEXT, 0)
        last = fields.integer("max_window_layers", 0, MAX_CONTEXT, 28)
        if fields.raw("layer_types") is not None or not on:
            return layer_windows(fields, layers, window if on else 0, 0)
        return [window if i % 2 == 0 and i < last else 0 for i in range(layers)]

    def mlp_tensor(self, name: str, layer: Layer) -> str:
        """Returns the name of the shared expert's tensor for that of an MLP."""
        return name if layer.experts is None else name.replace(".mlp.", ".mlp.shared_expert.")
