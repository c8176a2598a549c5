"""Qwen2 and Qwen2.5."""

from dataclasses import replace

from turbomind.models.base import Family, Layer, optional_windows
from turbomind.models.config import Fields


class Qwen2(Family):
    """Biases on q, k and v only."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    default_max_positions = 32768
    default_kv_heads = 32

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Sets the biases, also if `attention_bias` is false, as in the reference."""
        fields.flag("attention_bias", True)
        return replace(layer, qkv_bias=True)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window` with `layer_types` or `max_window_layers`."""
        return optional_windows(fields, layers)
