"""Gemma 4 12B, whose encoders are parts of the language model."""

from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.gemma.gemma4 import Gemma4
from turbomind.models.wrapper import Wrapper


class Gemma4Unified(Gemma4):
    """The 12B, which has no per-layer inputs and no experts."""

    names = {"Gemma4UnifiedForCausalLM": "gemma4_unified_text"}
    wrappers = {
        "Gemma4UnifiedForConditionalGeneration": Wrapper("gemma4_unified", "gemma4_unified_text")
    }

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the MLP for all layers."""
        return [layer] * layers

    def _per_layer(self, fields: Fields, vocab: int) -> int:
        return 0
