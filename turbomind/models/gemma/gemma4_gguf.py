"""What GGUF files of Gemma 4 say of layers that differ."""

from __future__ import annotations

from typing import Any

from turbomind.errors import ModelError
from turbomind.models.gguf import DIVISORS, GgufFile, Values, per_layer, table, wrong


def complete(file: GgufFile, own: Values, values: Values) -> None:
    """Sets what differs between layers of full attention and those with a window."""
    count, width = values["num_hidden_layers"], values.get("head_dim")
    if not isinstance(count, int) or not 0 < count <= 1000 or not isinstance(width, int):
        raise wrong(file, "attention.key_length", f"a number, and one of {count} layers")
    local = own.pop("attention.sliding_window_pattern", None)
    if isinstance(local, bool):
        local = [local] * count
    if not isinstance(local, list) or len(local) != count or not {*local} <= {False, True}:
        raise wrong(file, "attention.sliding_window_pattern", f"{count} bools")
    values["layer_types"] = [("full_attention", "sliding_attention")[each] for each in local]
    shared = values.get("num_kv_shared_layers", 0)
    own_kv = max(0, count - shared) if isinstance(shared, int) else count  # layers
    full = [i for i in range(count) if not local[i]]
    values["attention_k_eq_v"] = any(
        i < own_kv and f"blk.{i}.attn_v.weight" not in file.tensors for i in full
    )
    narrow = _widths_of_heads(file, own, width)
    kv = per_layer(file, "attention.head_count_kv", values["num_key_value_heads"], count)
    values["head_dim"] = narrow
    values["num_key_value_heads"] = next((kv[i] for i in range(count) if local[i]), kv[0])
    values["per_layer_config"] = {
        str(i): {"head_dim": width, "num_key_value_heads": kv[i]} for i in full
    }
    values["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": values.pop("rope_theta"),
            "partial_rotary_factor": _rotated_share(file, width),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": own.pop("rope.freq_base_swa", 10000.0),
        },
    }
    _mlps(file, values, own_kv)
    inputs = file.tensors.get("per_layer_token_embd.weight")
    values["vocab_size_per_layer_input"] = None if inputs is None else inputs.shape[0]
    values.setdefault("hidden_size_per_layer_input", 0)


def _widths_of_heads(file: GgufFile, own: Values, width: int) -> Any:
    """Returns the width of a head in layers with a window, `width` in the others: that of K, V and
    the rotation."""
    narrow = own.pop("attention.key_length_swa", width)
    for end, expected in (("", width), ("_swa", narrow)):
        for name in ("attention.value_length", "rope.dimension_count"):
            if own.pop(f"{name}{end}", expected) != expected:
                raise wrong(file, f"{name}{end}", f"the width of a head, {expected}")
    return narrow


def _mlps(file: GgufFile, values: Values, own_kv: int) -> None:
    """Sets the width of MLPs, which those after the layers with KV of their own may have twice, and
    the flag of experts."""
    count = len(values["layer_types"])
    inner = per_layer(file, "feed_forward_length", values["intermediate_size"], count)
    double = inner[-1] != inner[0]
    if inner != [inner[0]] * own_kv + [inner[0] * (2 if double else 1)] * (count - own_kv):
        raise wrong(file, "feed_forward_length", "one width, or twice it in layers of shared KV")
    values["use_double_wide_mlp"], values["intermediate_size"] = double, inner[0]
    values["enable_moe_block"] = bool(values.get("num_experts"))
    if values["enable_moe_block"] and "top_k_experts" not in values:
        raise wrong(file, "expert_used_count", "a number")


def _rotated_share(file: GgufFile, width: int) -> float:
    """Returns the share of the frequencies of a head that rotate: the divisors of others are so
    large that nothing is left of them."""
    divisors = table(file, DIVISORS, width // 2)
    rotated = int((divisors == 1).sum())
    if (divisors[:rotated] != 1).any() or (divisors[rotated:] < 1e20).any():
        raise ModelError(
            f"{file.path}: tensor {DIVISORS} has other values than ones and, after them, values of "
            "1e20 or more, expected a proportional rotation"
        )
    return min(1.0, (2 * rotated + 1) / width)  # the family rounds the product down
