"""Qwen2 and Qwen2.5, and the language models of Qwen2-VL and Qwen2.5-VL."""

from dataclasses import replace

from turbomind.models.base import Family, optional_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.gguf import SECTIONS, Architecture
from turbomind.models.rope import TYPES, RopeRules
from turbomind.models.wrapper import Wrapper


class Qwen2(Family):
    """Biases on q, k and v only."""

    names = {"Qwen2ForCausalLM": "qwen2"}
    gguf = {
        "qwen2": Architecture("Qwen2ForCausalLM"),
        "qwen2vl": Architecture("Qwen2ForCausalLM", harmless=SECTIONS),
    }

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Sets the biases."""
        return replace(layer, qkv_bias=True)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window` with `layer_types` or `max_window_layers`."""
        return optional_windows(fields, layers)


class Qwen2_5VL(Qwen2):  # noqa: N801
    """A Qwen2. mrope gives a token of an image three positions; those of text are equal."""

    names = {}
    wrappers = {
        f"{name}ForConditionalGeneration": Wrapper(kind, f"{kind}_text", flat=True)
        for name, kind in (("Qwen2_5_VL", "qwen2_5_vl"), ("Qwen2VL", "qwen2_vl"))
    }
    rope_rules = RopeRules(
        types={name: name for name in TYPES} | {"mrope": "default"}, of_images=("mrope_section",)
    )
