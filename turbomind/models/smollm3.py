"""SmolLM3: a Llama of which some layers do not rotate q and k."""

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.gguf import DIVISORS, Architecture
from turbomind.models.llama import Llama
from turbomind.models.rope import MAX_CONTEXT


class SmolLM3(Llama):
    """`attention_bias` and `mlp_bias` as in Llama; layers without rotation may have a window."""

    names = {"SmolLM3ForCausalLM": "smollm3"}
    gguf = {"smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True, tables=(DIVISORS,))}

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `use_sliding_window`: the windows are those of `layer_types`, else of the layers
        that do not rotate."""
        on = fields.flag("use_sliding_window", False)
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0) if on else 0
        fields.raw("sliding_window")
        if fields.raw("layer_types") is not None:
            return layer_windows(fields, layers, window, 0)
        return [window if rope < 0 else 0 for rope in self.ropes(fields, layers)]

    def ropes(self, fields: Fields, layers: int) -> list[int]:
        """Reads `no_rope_layers` (1: the layer rotates, 0: it does not), else an interval."""
        interval = fields.integer("no_rope_layer_interval", 1, MAX_CONTEXT, 4)
        listed = fields.raw("no_rope_layers")
        if listed is None:
            return [0 if (i + 1) % interval else -1 for i in range(layers)]
        known = isinstance(listed, list) and all(type(v) is int and v in (0, 1) for v in listed)
        if not known or len(listed) < layers:
            raise fields.error("no_rope_layers", f"{layers} times 0 or 1")
        return [0 if rotated else -1 for rotated in listed[:layers]]
