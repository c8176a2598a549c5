"""Gemma 4 12B, whose encoders are parts of the language model."""

from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.gemma.gemma4 import SIZES, Gemma4
from turbomind.models.wrapper import Wrapper


class Gemma4Unified(Gemma4):
    """The 12B, which has no per-layer inputs and no experts."""

    names = {"Gemma4UnifiedForCausalLM": "gemma4_unified_text"}
    wrappers = {
        "Gemma4UnifiedForConditionalGeneration": Wrapper(
            "gemma4_unified", "gemma4_unified_text", sizes=SIZES
        )
    }
    defaults = {
        **{name: value for name, value in Gemma4.defaults.items() if "per_layer" not in name},
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    }

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the MLP for all layers."""
        return [layer] * layers

    def _per_layer(self, fields: Fields, vocab: int) -> int:
        return 0
