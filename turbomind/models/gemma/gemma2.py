"""Gemma 2: norms before and after attention and MLP, soft-caps, windows in every other layer."""

from collections.abc import Callable
from dataclasses import replace

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.gemma.gemma import GELU_TANH, Gemma
from turbomind.models.gguf import WINDOW, Architecture, GgufFile, Values, head_dim, wrong
from turbomind.models.rope import MAX_CONTEXT

GGUF_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}


def gguf_windows(every: int, window: int, large: int) -> Callable[[GgufFile, Values, Values], None]:
    """Sets which layers have a window, by default of `window` tokens and all but each `every`th,
    and the scale of q k, which differs in models of `large` layers."""

    def complete(file: GgufFile, own: Values, values: Values) -> None:
        layers, width = values["num_hidden_layers"], head_dim(values)
        if not isinstance(layers, int) or not 0 < layers <= 1000 or not width:
            return  # the family refuses it
        tokens = values.get("sliding_window", window)
        pattern = own.pop("attention.sliding_window_pattern", every)
        if isinstance(pattern, bool):
            pattern = [pattern] * layers
        if isinstance(pattern, int) and pattern >= 0:
            pattern = [pattern == 0 or (i + 1) % pattern != 0 for i in range(layers)]
        known = isinstance(pattern, list) and all(type(one) in (bool, int) for one in pattern)
        if not known or len(pattern) != layers:
            raise wrong(file, "attention.sliding_window_pattern", f"{layers} values or a period")
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [kinds[bool(one and tokens)] for one in pattern]
        values["sliding_window"] = tokens or 1
        if layers == large:
            width = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = width

    return complete


class Gemma2(Gemma):
    """`attention_bias` as in Gemma; absent soft-caps are 50 and 30, null means none."""

    names = {"Gemma2ForCausalLM": "gemma2"}
    gguf = {
        "gemma2": Architecture(
            "Gemma2ForCausalLM",
            fields=WINDOW | GGUF_CAPS,
            names=GGUF_NORMS,
            shifted_norms=True,
            complete=gguf_windows(2, 4096, 46),
        )
    }
    attn_post_norm = "model.layers.{i}.post_attention_layernorm"
    mlp_norm = "model.layers.{i}.pre_feedforward_layernorm"
    mlp_post_norm = "model.layers.{i}.post_feedforward_layernorm"

    def activation(self, fields: Fields) -> str:
        """Reads `hidden_activation`; the reference does not read the older `hidden_act`."""
        fields.choice("hidden_activation", GELU_TANH, GELU_TANH[0])
        return "gelu_tanh"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag, the scale of q k and its soft-cap."""
        scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e9, 256)
        return replace(
            super().traits(fields, layer),
            attn_scale=scalar**-0.5,
            softcap=fields.number("attn_logit_softcapping", 1e-6, 1e9, 0.0),
            post_norms=True,
        )

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `layer_types`, else every second layer has full attention."""
        return self._windows(fields, layers, 2)

    def _windows(self, fields: Fields, layers: int, every: int) -> list[int]:
        window = fields.integer("sliding_window", 1, MAX_CONTEXT)
        if fields.raw("layer_types") is not None:
            return layer_windows(fields, layers, window, 0)
        return [0 if (i + 1) % every == 0 else window for i in range(layers)]

    def ends(self, fields: Fields, model: Description) -> Description:
        """Reads the soft-cap of the logits."""
        cap = fields.number("final_logit_softcapping", 1e-6, 1e9, 0.0)
        return replace(super().ends(fields, model), final_softcap=cap)
