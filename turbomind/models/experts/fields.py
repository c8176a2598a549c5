"""Config fields that the families with experts share."""

from __future__ import annotations

from turbomind.models.base import MAX_LAYERS, MAX_WIDTH
from turbomind.models.config import Fields
from turbomind.models.description import Experts, Layer

STACKED = {
    "gate_ups": "model.layers.{i}.mlp.experts.gate_up_proj",
    "downs": "model.layers.{i}.mlp.experts.down_proj",
}
"""The tensors of experts in transformers 5 (`Family.modules`)."""
MAX_EXPERTS, MAX_TOP_K = 1024, 32  # as the kernels that route tokens take


def read_experts(
    fields: Fields,
    default_count: int | None,
    intermediate: str,
    renormalize: bool,
    top_k: str = "num_experts_per_tok",
) -> Experts:
    """Reads the fields of experts.

    Args:
        fields: The config.
        default_count: Experts where the config has neither name of their number; None: it must.
        intermediate: Name of the field with the width of an expert.
        renormalize: See `Experts`.
        top_k: Name of the field with the number of a token's experts.

    Raises:
        ModelError: A field is wrong; the message has its name and value.
    """
    name, other = "num_experts", "num_local_experts"
    if fields.raw(other) is not None:
        name, other = other, name
    default = () if default_count is None else (default_count,)
    count: int = fields.integer(name, 1, MAX_EXPERTS, *default)
    if fields.raw(other, count) != count:
        raise fields.error(other, f"{name}, {count}")
    chosen: int = fields.integer(top_k, 1, MAX_TOP_K)
    if chosen > count:
        raise fields.error(top_k, f"at most the number of experts, {count}")
    width: int = fields.integer(intermediate, 1, 4 * MAX_WIDTH)
    return Experts(count, chosen, width, renormalize)


def sparse_layers(fields: Fields, dense: Layer, sparse: Layer, layers: int) -> list[Layer]:
    """Returns `sparse` for each `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    listed = fields.raw("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise fields.error("mlp_only_layers", "a list of layers")
    return [dense if i in listed or (i + 1) % step else sparse for i in range(layers)]
