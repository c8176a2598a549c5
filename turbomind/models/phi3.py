"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with fused projections."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer, Rows, whole
from turbomind.models.rope import MAX_CONTEXT, RopeRules


class Phi3(Family):
    """No biases; one window for all layers; heads of Phi-4-mini are rotated in part."""

    names = {"Phi3ForCausalLM": "phi3"}
    # "su" and "yarn" are what older files call longrope.
    rope_rules = RopeRules(
        types=dict.fromkeys(("longrope", "su", "yarn"), "longrope") | {"default": "default"},
        partial=True,
    )
    qkv = "model.layers.{i}.self_attn.qkv_proj"
    gate_up = "model.layers.{i}.mlp.gate_up_proj"

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window`; null means none."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0)
        return layer_windows(fields, layers, window, 0)

    def qkv_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns the whole fused tensor, which has the core's order."""
        heads = layer.heads + 2 * layer.kv_heads
        return whole(f"{self.qkv}.{kind}", heads * layer.head_dim, *columns)

    def gate_up_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns the whole fused tensor, which has the core's order."""
        return whole(f"{self.gate_up}.{kind}", 2 * layer.intermediate, *columns)
