"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with fused projections."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer, Rows, whole
from turbomind.models.gguf import WINDOW, Architecture, GgufFile, Values, head_dim, table, wrong
from turbomind.models.rope import MAX_CONTEXT, RopeRules

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the share of a head that is rotated, the window, and the factors of a longrope."""
    width = head_dim(values)
    rotated = own.pop("rope.dimension_count", width)
    if not width:
        return
    if not isinstance(rotated, int) or not 2 <= rotated <= width:
        raise wrong(file, "rope.dimension_count", f"a number from 2 to the head's width, {width}")
    # The family rounds the product down.
    values["partial_rotary_factor"] = 1.0 if rotated == width else (rotated + 0.5) / width
    values["sliding_window"] = values.get("sliding_window") or None
    attention = own.pop("rope.scaling.attn_factor", None)
    if _LONG not in file.tensors:
        return
    scaling: Values = {"rope_type": "longrope"}
    for name, tensor in (("long_factor", _LONG), ("short_factor", _SHORT)):
        scaling[name] = table(file, tensor, rotated // 2).tolist()
    if attention is not None:
        scaling["attention_factor"] = attention
    values["rope_scaling"] = scaling


class Phi3(Family):
    """No biases; one window for all layers; heads of Phi-4-mini are rotated in part."""

    names = {"Phi3ForCausalLM": "phi3"}
    gguf = {
        "phi3": Architecture(
            "Phi3ForCausalLM",
            fields=WINDOW
            | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
            names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
            tables=(_LONG, _SHORT),
            complete=_complete,
        )
    }
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
