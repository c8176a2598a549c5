"""gpt-oss: biased experts with a SwiGLU of their own, and sinks in attention."""

from collections.abc import Iterator
from dataclasses import replace

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Experts, Layer, Rows
from turbomind.models.experts.fields import read_experts
from turbomind.models.gguf import Architecture, GgufFile, Values, check_experts, wrong
from turbomind.models.rope import MAX_CONTEXT, Rope, read_rope

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the width of experts."""
    check_experts(file, own, values)
    for name in ("attention.sliding_window", "expert_feed_forward_length"):
        if name not in own:
            raise wrong(file, name, "a number")
    values["sliding_window"] = own.pop("attention.sliding_window")
    values["intermediate_size"] = own.pop("expert_feed_forward_length")


class GptOss(Family):
    """`attention_bias` puts biases on q, k, v and o; every other layer has a window. Tensors stack
    the experts, transposed, and the rows of gate and up alternate."""

    names = {"GptOssForCausalLM": "gpt_oss"}
    gguf = {
        "gpt-oss": Architecture(
            "GptOssForCausalLM",
            names={"post_attention_layernorm": "post_attention_norm"},
            scaling={"truncate": False},
            complete=_complete,
        )
    }
    router = "model.layers.{i}.mlp.router"
    gate_ups = "model.layers.{i}.mlp.experts.gate_up_proj"
    downs = "model.layers.{i}.mlp.experts.down_proj"

    def activation(self, fields: Fields) -> str:
        """Reads the activation and its constants, which no published model changes."""
        for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if fields.number(name, -1e6, 1e6, value) != value:
                raise fields.error(name, f"{value}")
        return "swiglu"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", True)
        return replace(layer, qkv_bias=bias, o_bias=bias, sinks=True)

    def rope_tables(
        self, fields: Fields, head_dim: int, max_positions: int, length: int | None
    ) -> list[Rope]:
        """Returns the table, scaled by default."""
        if not fields.raw("rope_scaling") and not fields.raw("rope_parameters"):
            theta = fields.raw("rope_theta")
            fields = Fields({"rope_theta": theta, "rope_scaling": _ROPE}, fields.where)
        return [read_rope(fields, self.rope_rules, head_dim, max_positions, length)]

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window` with `layer_types`; without these the even layers have it."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 128)
        if fields.raw("layer_types") is not None:
            return layer_windows(fields, layers, window, 0)
        return [0 if i % 2 else window for i in range(layers)]

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the same experts for all layers."""
        experts = read_experts(fields, 128, "intermediate_size", True)
        experts = replace(experts, router_bias=True, bias=True)
        return [replace(layer, intermediate=0, experts=experts)] * layers

    def expert_gate_up_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`: all of its gate, then all of its up."""
        inner = experts.intermediate
        shape = (experts.count, hidden, 2 * inner)
        return [Rows(self.gate_ups, shape, first, inner, j, 2, True) for first in (0, 1)]

    def expert_down_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`."""
        shape = (experts.count, experts.intermediate, hidden)
        return [Rows(self.downs, shape, 0, hidden, j, transposed=True)]

    def expert_bias_slots(
        self, experts: Experts, j: int, hidden: int
    ) -> Iterator[tuple[str, list[Rows]]]:
        """Yields the slots of the biases of expert `j`."""
        inner = experts.intermediate
        gate_up = f"{self.gate_ups}_bias", (experts.count, 2 * inner)
        yield (
            f"experts.{j}.gate_up_bias",
            [Rows(*gate_up, first, inner, j, 2) for first in (0, 1)],
        )
        down = Rows(f"{self.downs}_bias", (experts.count, hidden), 0, hidden, j)
        yield f"experts.{j}.down_bias", [down]
