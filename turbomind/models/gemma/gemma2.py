"""Gemma 2: norms before and after attention and MLP, soft-caps, windows in every other layer."""

from dataclasses import replace

from turbomind.models.base import layer_windows
from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.gemma.gemma import GELU_TANH, Gemma
from turbomind.models.rope import MAX_CONTEXT


class Gemma2(Gemma):
    """`attention_bias` as in Gemma; absent soft-caps are 50 and 30, null means none."""

    names = {"Gemma2ForCausalLM": "gemma2"}
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
