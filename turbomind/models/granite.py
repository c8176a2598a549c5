"""Granite 3 and later, dense: a Llama with multipliers."""

from dataclasses import replace

from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.gguf import DIVISORS, Architecture, GgufFile, Values, head_dim, wrong
from turbomind.models.llama import Llama


def complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the multipliers, of which 0 and absent mean that there is none."""
    if not values.get("logits_scaling"):
        raise wrong(file, "logit_scale", "a number")
    if own.pop("rope.scaling.finetuned", True) is not True:
        raise wrong(file, "rope.scaling.finetuned", "True: q and k are rotated")
    for name in ("embedding_multiplier", "residual_multiplier"):
        values[name] = values.get(name) or 1.0
    if not values.get("attention_multiplier"):
        values["attention_multiplier"] = max(head_dim(values), 1) ** -0.5


GGUF = Architecture(
    "GraniteForCausalLM",
    interleaved=True,
    fields={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    tables=(DIVISORS,),
    complete=complete,
)


class Granite(Llama):
    """`attention_bias` and `mlp_bias` as in Llama; four multipliers, 1 where absent."""

    names = {"GraniteForCausalLM": "granite"}
    gguf = {"granite": GGUF}

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
