"""Mistral, with and without a sliding window."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.rope import MAX_CONTEXT
from turbomind.models.wrapper import Wrapper


class Mistral(Family):
    """No biases; one window for all layers, none when `sliding_window` is null."""

    names = {"MistralForCausalLM": "mistral"}
    wrappers = {
        "Mistral3ForConditionalGeneration": Wrapper(
            "mistral3",
            "mistral",
            sizes={
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "vocab_size": 32000,
            },
        )
    }
    defaults = {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096
    }  # fmt: skip

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window`; null means none, absent the default."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0)
        windows = layer_windows(fields, layers, window, 0)
        if windows != [window] * layers:
            raise fields.error("layer_types", "one kind of attention for all layers")
        return windows
