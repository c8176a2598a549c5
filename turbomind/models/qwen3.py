"""Qwen3, dense, and the language model of Qwen3-VL."""

from dataclasses import replace

from turbomind.models.base import Family, layer_windows, optional_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.gguf import SECTIONS, Architecture
from turbomind.models.rope import RopeRules
from turbomind.models.wrapper import Wrapper


class Qwen3(Family):
    """Per-head RMS norm of q and k; `attention_bias` puts biases on q, k, v and o."""

    names = {"Qwen3ForCausalLM": "qwen3"}
    gguf = {
        "qwen3": Architecture("Qwen3ForCausalLM"),
        "qwen3vl": Architecture("Qwen3ForCausalLM", harmless=SECTIONS),
    }

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag."""
        bias = fields.flag("attention_bias", False)
        return replace(layer, qk_norm=True, qkv_bias=bias, o_bias=bias)

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window` with `layer_types` or `max_window_layers`."""
        return optional_windows(fields, layers)


class Qwen3VL(Qwen3):
    """A Qwen3 without windows. mrope gives a token of an image three positions; those of text are
    equal."""

    names = {}
    wrappers = {"Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl", "qwen3_vl_text")}
    rope_rules = RopeRules(of_images=("mrope_section", "mrope_interleaved"))

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Returns full attention; the reference has no window."""
        return layer_windows(fields, layers, 0, 0)
