"""Qwen3, dense, and the language model of Qwen3-VL."""

from dataclasses import replace

from turbomind.models.base import Family, optional_windows
from turbomind.models.config import Fields
from turbomind.models.description import Layer
from turbomind.models.rope import RopeRules
from turbomind.models.wrapper import Wrapper


class Qwen3(Family):
    """Per-head RMS norm of q and k; `attention_bias` puts biases on q, k, v and o."""

    names = {"Qwen3ForCausalLM": "qwen3"}
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}

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
    wrappers = {
        "Qwen3VLForConditionalGeneration": Wrapper(
            "qwen3_vl",
            "qwen3_vl_text",
            sizes={
                "hidden_size": 4096,
                "intermediate_size": 22016,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "vocab_size": 151936,
            },
        )
    }
    defaults = {
        "max_position_embeddings": 128000,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 5e5,
    }
    rope_rules = RopeRules(ignored=("mrope_section", "mrope_interleaved"))

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Returns full attention; the reference reads no window."""
        return [0] * layers
