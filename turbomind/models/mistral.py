"""Mistral, with and without a sliding window."""

from turbomind.models.base import Family, layer_windows
from turbomind.models.config import Fields
from turbomind.models.gguf import DIVISORS, Architecture, GgufFile, Values, wrong
from turbomind.models.rope import MAX_CONTEXT
from turbomind.models.wrapper import Wrapper


def _complete(file: GgufFile, own: Values, values: Values) -> None:
    """Refuses the temperature of positions, which Ministral 3 alone has."""
    for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"):
        if own.pop(key, 0.0) != 0.0:
            raise wrong(file, key, "0 or nothing")
    values["sliding_window"] = None


class Mistral(Family):
    """No biases; one window for all layers, none when `sliding_window` is null."""

    names = {"MistralForCausalLM": "mistral"}
    wrappers = {"Mistral3ForConditionalGeneration": Wrapper("mistral3", "mistral")}
    gguf = {
        "mistral3": Architecture(
            "MistralForCausalLM", interleaved=True, tables=(DIVISORS,), complete=_complete
        )
    }

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `sliding_window`; null means none, absent the default."""
        window = fields.integer("sliding_window", 1, MAX_CONTEXT, 0)
        windows = layer_windows(fields, layers, window, 0)
        if windows != [window] * layers:
            raise fields.error("layer_types", "one kind of attention for all layers")
        return windows
