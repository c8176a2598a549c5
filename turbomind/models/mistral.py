"""Mistral, with and without a sliding window."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.rope import MAX_CONTEXT
from turbomind.models.wrapper import Wrapper


class Mistral(Family):
    """No biases; one window for all layers, none when `sliding_window` is null."""

    names = {"MistralForCausalLM": "mistral"}
    wrappers = {"Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral")}

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window`; null means none, absent the default."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0)
        windows = layer_windows(fields, layers, window, 0)
        if windows != [window] * layers:
            raise fields.error("layer_types", "one kind of attention for all layers")
        return windows
