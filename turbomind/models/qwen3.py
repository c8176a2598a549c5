"""Qwen3, dense."""

from dataclasses import replace

from turbomind.models.base import Family, Layer, optional_windows
from turbomind.models.config import Fields


class Qwen3(Family):
    """Per-head RMS norm of q and k; `attention_bias` puts biases on q, k, v and o."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    default_max_positions = 32768
    default_kv_heads = 32
    default_head_dim = 128

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", False)
        return replace(layer, qk_norm=True, qkv_bias=bias, o_bias=bias)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window` with `layer_types` or `max_window_layers`."""
        return optional_windows(fields, layers)
