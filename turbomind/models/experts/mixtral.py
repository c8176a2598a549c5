"""Mixtral: a Mistral with experts in all layers."""

from dataclasses import replace

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.experts.fields import STACKED, read_experts
from turbomind.models.mistral import Mistral
from turbomind.models.rope import MAX_CONTEXT


class Mixtral(Mistral):
    """The weights of a token's experts have the sum 1."""

    names = {"MixtralForCausalLM": "mixtral"}
    wrappers = {}
    router = "model.layers.{i}.block_sparse_moe.gate"
    expert_gate = "model.layers.{i}.block_sparse_moe.experts.{j}.w1"
    expert_up = "model.layers.{i}.block_sparse_moe.experts.{j}.w3"
    expert_down = "model.layers.{i}.block_sparse_moe.experts.{j}.w2"

    modules = {"router": "model.layers.{i}.mlp.gate", **STACKED}

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the same experts for all layers."""
        experts = read_experts(fields, 8, "intermediate_size", True)
        return [replace(layer, intermediate=0, experts=experts)] * layers

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window`; null or absent means none."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0)
        return layer_windows(fields, layers, window, 0)
