"""Granite 3 and later, dense: a Llama with multipliers."""

from dataclasses import replace

from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.llama import Llama


class Granite(Llama):
    """`attention_bias` and `mlp_bias` as in Llama; four multipliers, 1 where absent."""

    names = {"GraniteForCausalLM": "granite"}

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flags and multipliers."""
        return self.multipliers(fields, super().traits(fields, layer))

    def multipliers(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the multipliers of q k and of the residual stream."""
        return replace(
            layer,
            attn_scale=_multiplier(fields, "attention_multiplier"),
            residual_scale=_multiplier(fields, "residual_multiplier"),
        )

    def ends(self, fields: Fields, model: Description) -> Description:
        """Reads the multiplier of embeddings and the divisor of logits."""
        return replace(
            model,
            embed_scale=_multiplier(fields, "embedding_multiplier"),
            logit_scale=1 / _multiplier(fields, "logits_scaling"),
        )


def _multiplier(fields: Fields, name: str) -> float:
    value: float = fields.number(name, 1e-6, 1e6, 1.0)
    return value
