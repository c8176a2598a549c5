"""What differs between the layers of Gemma 4: the heads of full attention, and shared KV."""

from collections.abc import Sequence
from dataclasses import replace

from turbomind.models.base import MAX_HEAD_DIM, MAX_WIDTH
from turbomind.models.config import Fields
from turbomind.models.description import Layer

Layers = tuple[Layer, ...]


def full_heads(fields: Fields, windows: Sequence[int], kv_heads: int) -> tuple[int, int]:
    """Returns the width of heads and the number of KV heads in layers of full attention.

    Newer files have them in `per_layer_config`, an object for each of these layers.

    Args:
        fields: The config.
        windows: The window of each layer; 0 means full attention.
        kv_heads: KV heads where the config has no other number for these layers.
    """
    dim = fields.integer("global_head_dim", 2, MAX_HEAD_DIM, 512)
    heads = fields.integer("num_global_key_value_heads", 1, MAX_WIDTH, None)
    if heads is None or not fields.flag("attention_k_eq_v", False):
        heads = kv_heads
    by_layer = fields.raw("per_layer_config")
    if dim % 2:
        raise fields.error("global_head_dim", "an even number")
    if by_layer is None:
        return dim, heads
    full = {str(i) for i, window in enumerate(windows) if not window}
    objects = list(by_layer.values()) if isinstance(by_layer, dict) else []
    equal = all(isinstance(each, dict) and each == objects[0] for each in objects)
    if not objects or not equal or by_layer.keys() != full:
        raise fields.error("per_layer_config", "equal objects for all layers of full attention")
    own = Fields(objects[0], f"{fields.where}: per_layer_config")
    dim = own.integer("head_dim", 2, MAX_HEAD_DIM, fields.raw("head_dim"))
    if dim % 2:
        raise own.error("head_dim", "an even number")
    heads = own.integer("num_key_value_heads", 1, MAX_WIDTH, kv_heads)
    own.refuse_others()
    return dim, heads


def with_full_heads(fields: Fields, layers: Layers, windows: Sequence[int]) -> Layers:
    """Returns layers of which those with full attention have heads of their own, and V of K's rows
    if `attention_k_eq_v`."""
    dim, heads = full_heads(fields, windows, layers[0].kv_heads)
    k_eq_v = fields.flag("attention_k_eq_v", False)
    return tuple(
        layer if window else replace(layer, head_dim=dim, kv_heads=heads, k_eq_v=k_eq_v)
        for layer, window in zip(layers, windows, strict=True)
    )


def with_shared_kv(fields: Fields, layers: Layers, windows: Sequence[int]) -> Layers:
    """Returns layers of which the last `num_kv_shared_layers` read the KV of the last layer of
    their type before them, with MLPs of twice the width if `use_double_wide_mlp`."""
    factor = 2 if fields.flag("use_double_wide_mlp", False) else 1
    own_kv = len(layers) - fields.integer("num_kv_shared_layers", 0, len(layers) - 1, 0)
    if set(windows[:own_kv]) != set(windows):
        raise fields.error("num_kv_shared_layers", "a layer of each type before these layers")

    def shared(i: int) -> Layer:
        last = max(j for j in range(own_kv) if windows[j] == windows[i])
        inner = factor * layers[i].intermediate
        return replace(layers[i], kv_layer=last, k_eq_v=False, intermediate=inner)

    return (*layers[:own_kv], *(shared(i) for i in range(own_kv, len(layers))))
