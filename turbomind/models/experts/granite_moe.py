"""Granite with experts, such as Granite-3.1-1B-A400M."""

from dataclasses import replace

from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.experts.fields import read_experts
from turbomind.models.gguf import GgufFile, Values, check_experts
from turbomind.models.granite import GGUF, Granite, complete


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    check_experts(file, own, values)
    complete(file, own, values)


class GraniteMoe(Granite):
    """One tensor stacks the gates and ups of all experts, another one the downs."""

    names = {"GraniteMoeForCausalLM": "granitemoe"}
    gguf = {"granitemoe": replace(GGUF, name="GraniteMoeForCausalLM", complete=_complete)}
    router = "model.layers.{i}.block_sparse_moe.router.layer"
    gate_ups = "model.layers.{i}.block_sparse_moe.input_linear.weight"
    downs = "model.layers.{i}.block_sparse_moe.output_linear.weight"
    modules = {
        "router": "model.layers.{i}.block_sparse_moe.router",
        "gate_ups": "model.layers.{i}.block_sparse_moe.experts.gate_up_proj",
        "downs": "model.layers.{i}.block_sparse_moe.experts.down_proj",
    }

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag of attention and the multipliers."""
        bias = fields.flag("attention_bias", False)
        return self.multipliers(fields, replace(layer, qkv_bias=bias, o_bias=bias))

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the same experts for all layers."""
        experts = read_experts(fields, 8, "intermediate_size", True)
        return [replace(layer, intermediate=0, experts=experts)] * layers
