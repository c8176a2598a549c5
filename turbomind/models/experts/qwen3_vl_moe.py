"""The language model of Qwen3-VL with experts."""

from dataclasses import replace

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Experts, Layer, Rows
from turbomind.models.experts.fields import read_experts, sparse_layers
from turbomind.models.experts.qwen3_moe import Qwen3Moe
from turbomind.models.rope import RopeRules
from turbomind.models.wrapper import Wrapper


class Qwen3VLMoe(Qwen3Moe):
    """Tensors stack the experts, on hubs transposed."""

    names = {}
    modules = {}
    wrappers = {
        "Qwen3VLMoeForConditionalGeneration": Wrapper(
            "qwen3_vl_moe", "qwen3_vl_moe_text", outer_tie=True
        )
    }
    rope_rules = RopeRules(of_images=("mrope_section", "mrope_interleaved"))
    gate_ups = "model.layers.{i}.mlp.experts.gate_up_proj"
    downs = "model.layers.{i}.mlp.experts.down_proj"

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Reads the experts, whose weights have the sum 1, and which layers have an MLP instead."""
        experts = read_experts(fields, 60, "moe_intermediate_size", True)
        return sparse_layers(fields, layer, replace(layer, intermediate=0, experts=experts), layers)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Returns full attention; the reference has no window."""
        return layer_windows(fields, layers, 0, 0)

    def expert_gate_up_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`: all of its gate, then all of its up."""
        rows = 2 * experts.intermediate
        shape = (experts.count, hidden, rows)
        return [Rows(self.gate_ups, shape, 0, rows, j, transposed=True)]

    def expert_down_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`."""
        shape = (experts.count, experts.intermediate, hidden)
        return [Rows(self.downs, shape, 0, hidden, j, transposed=True)]

    def stored(self, rows: Rows, shape: tuple[int, ...]) -> Rows:
        """Returns rows of a tensor that transformers has saved, which turns it."""
        turned = (*rows.shape[:-2], *rows.shape[:-3:-1])
        if rows.transposed and shape == turned != rows.shape:
            return replace(rows, shape=turned, transposed=False)
        return rows
