"""Mistral, with and without a sliding window."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.rope import MAX_CONTEXT


class Mistral(Family):
    """No biases; one window for all layers, none when `sliding_window` is null."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    default_max_positions = 131072
    default_kv_heads = 8

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """An absent `sliding_window` means 4096, as in the reference."""
        default = 0 if fields.has("sliding_window") else 4096
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, default)
        windows = layer_windows(fields, layers, window, 0)
        if windows != [window] * layers:
            raise fields.error("layer_types", "one kind of attention for all layers")
        return windows
