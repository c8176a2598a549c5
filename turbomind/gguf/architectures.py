"""What GGUF files of an architecture say otherwise than a config.json and its checkpoint.

llama.cpp's src/models/ defines the keys and their defaults, and its conversion/ what converters
change in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turbomind.errors import ModelError
from turbomind.gguf.file import GgufFile

Values = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How the files of an architecture become a config.json.

    Attributes:
        name: Class of config.json.
        interleaved: The rotated elements of a head are neighbours.
        fields: Key without its architecture -> field of config.json, beside the common ones.
        harmless: Keys that change nothing for text.
        names: Name in a checkpoint of a hub -> name in a file, where it is not the common one.
        tables: Tensors that belong to the config.
        shifted_norms: The weights of norms have the family's offset added.
        bias: Field of config.json that says whether q, k and v have biases.
        scaling: Fields of a scaling of the rotation that files do not have.
        complete: Called with the file, its other keys and the fields, both without the
            architecture: sets the fields that files do not have.
    """

    name: str
    interleaved: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    shifted_norms: bool = False
    bias: str = "attention_bias"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    complete: Callable[[GgufFile, Values, Values], None] = lambda file, own, values: None


def wrong(file: GgufFile, key: str, expected: str) -> ModelError:
    """Returns the error of a key, or an own key of the architecture, with a wrong value."""
    own = f"{file.metadata.get('general.architecture')}.{key}"
    name = own if own in file.metadata else key
    seen = repr(file.metadata[name]) if name in file.metadata else "absent"
    return ModelError(f"{file.path}: {name} is {seen}, expected {expected}")


def _head_dim(values: Values) -> int:
    """Returns the width of a head; 0 where the sizes are wrong, which the family refuses."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    known = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    width = values.get("head_dim", hidden // heads if known else 0)
    return width if isinstance(width, int) and width > 0 else 0


def _gemma_windows(
    every: int, window: int, large: int
) -> Callable[[GgufFile, Values, Values], None]:
    """Sets which layers have a window, by default of `window` tokens and all but each `every`th,
    and the scale of q k, which differs in models of `large` layers."""

    def complete(file: GgufFile, own: Values, values: Values) -> None:
        layers, width = values["num_hidden_layers"], _head_dim(values)
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


def _phi3(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the share of a head that is rotated, the window, and the factors of a longrope."""
    width = _head_dim(values)
    rotated = own.pop("rope.dimension_count", width)
    if not width:
        return
    if not isinstance(rotated, int) or not 2 <= rotated <= width:
        raise wrong(file, "rope.dimension_count", f"a number from 2 to the head's width, {width}")
    # The family rounds the product down.
    values["partial_rotary_factor"] = 1.0 if rotated == width else (rotated + 0.5) / width
    values["sliding_window"] = values.get("sliding_window") or None
    attention = own.pop("rope.scaling.attn_factor", None)
    if LONG not in file.tensors:
        return
    scaling: Values = {"rope_type": "longrope"}
    for name, tensor in (("long_factor", LONG), ("short_factor", SHORT)):
        scaling[name] = table(file, tensor, rotated // 2).tolist()
    if attention is not None:
        scaling["attention_factor"] = attention
    values["rope_scaling"] = scaling


def _granite(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the multipliers, of which 0 and absent mean that there is none."""
    if not values.get("logits_scaling"):
        raise wrong(file, "logit_scale", "a number")
    if own.pop("rope.scaling.finetuned", True) is not True:
        raise wrong(file, "rope.scaling.finetuned", "True: q and k are rotated")
    for name in ("embedding_multiplier", "residual_multiplier"):
        values[name] = values.get(name) or 1.0
    if not values.get("attention_multiplier"):
        values["attention_multiplier"] = max(_head_dim(values), 1) ** -0.5


def _experts(file: GgufFile, own: Values, values: Values) -> None:
    """Refuses a file without the numbers of experts, for which the family has defaults."""
    for key, name in (
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
    ):
        if name not in values:
            raise wrong(file, key, "a number")


def _granitemoe(file: GgufFile, own: Values, values: Values) -> None:
    _experts(file, own, values)
    _granite(file, own, values)


def _llama(file: GgufFile, own: Values, values: Values) -> None:
    """Reads a Llama with experts as a Mixtral."""
    if values.get("num_experts"):
        _experts(file, own, values)
        values["architectures"] = ["MixtralForCausalLM"]


def _qwen3moe(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the sum of the weights of a token's experts, which is 1 in llama.cpp."""
    _experts(file, own, values)
    if "moe_intermediate_size" not in values:
        raise wrong(file, "expert_feed_forward_length", "a number")
    values["norm_topk_prob"] = True


def _qwen2moe(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the widths of experts, which early files do not have, and that the weights of a token's
    experts are shares of all, as in llama.cpp."""
    _experts(file, own, values)
    inner, used = values["intermediate_size"], values["num_experts_per_tok"]
    if isinstance(inner, int) and isinstance(used, int) and used > 0:
        values.setdefault("moe_intermediate_size", inner // used)
    values.setdefault("shared_expert_intermediate_size", inner)
    values["norm_topk_prob"] = False


def _gpt_oss(file: GgufFile, own: Values, values: Values) -> None:
    """Sets the width of experts."""
    _experts(file, own, values)
    for name in ("attention.sliding_window", "expert_feed_forward_length"):
        if name not in own:
            raise wrong(file, name, "a number")
    values["sliding_window"] = own.pop("attention.sliding_window")
    values["intermediate_size"] = own.pop("expert_feed_forward_length")


def _gemma4(file: GgufFile, own: Values, values: Values) -> None:
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
    narrow = _gemma4_widths_of_heads(file, own, width)
    kv = _per_layer(file, "attention.head_count_kv", values["num_key_value_heads"], count)
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
    _gemma4_mlps(file, values, own_kv)
    inputs = file.tensors.get("per_layer_token_embd.weight")
    values["vocab_size_per_layer_input"] = None if inputs is None else inputs.shape[0]
    values.setdefault("hidden_size_per_layer_input", 0)


def _gemma4_widths_of_heads(file: GgufFile, own: Values, width: int) -> Any:
    """Returns the width of a head in layers with a window, `width` in the others: that of K, V and
    the rotation."""
    narrow = own.pop("attention.key_length_swa", width)
    for end, expected in (("", width), ("_swa", narrow)):
        for name in ("attention.value_length", "rope.dimension_count"):
            if own.pop(f"{name}{end}", expected) != expected:
                raise wrong(file, f"{name}{end}", f"the width of a head, {expected}")
    return narrow


def _gemma4_mlps(file: GgufFile, values: Values, own_kv: int) -> None:
    """Sets the width of MLPs, which those after the layers with KV of their own may have twice, and
    the flag of experts."""
    count = len(values["layer_types"])
    inner = _per_layer(file, "feed_forward_length", values["intermediate_size"], count)
    double = inner[-1] != inner[0]
    if inner != [inner[0]] * own_kv + [inner[0] * (2 if double else 1)] * (count - own_kv):
        raise wrong(file, "feed_forward_length", "one width, or twice it in layers of shared KV")
    values["use_double_wide_mlp"], values["intermediate_size"] = double, inner[0]
    values["enable_moe_block"] = bool(values.get("num_experts"))
    if values["enable_moe_block"] and "top_k_experts" not in values:
        raise wrong(file, "expert_used_count", "a number")


def _per_layer(file: GgufFile, key: str, value: Any, count: int) -> list[Any]:
    """Returns a value for each layer, of a key that has one for all or a list."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise wrong(file, key, f"a number or {count} of them")
    return values


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


def _mistral3(file: GgufFile, own: Values, values: Values) -> None:
    """Refuses the temperature of positions, which Ministral 3 alone has."""
    for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"):
        if own.pop(key, 0.0) != 0.0:
            raise wrong(file, key, "0 or nothing")
    values["sliding_window"] = None


def table(file: GgufFile, name: str, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a table of rotations, float32 [count], positive and finite.

    Raises:
        ModelError: It is missing, or has another number, type or value.
    """
    found = file.tensors.get(name)
    if found is None:
        raise ModelError(f"{file.path}: tensor {name} is missing, expected F32 ({count},)")
    if found.dtype != "F32" or found.shape != (count,):
        raise ModelError(
            f"{file.path}: tensor {name} is {found.dtype} {found.shape}, expected F32 ({count},)"
        )
    values = np.frombuffer(file.data(found), "<f4")
    if not (np.isfinite(values) & (values >= 1e-6)).all():
        raise ModelError(
            f"{file.path}: tensor {name} has a value that is not positive and finite, "
            "expected divisors of frequencies"
        )
    return values


DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_WINDOW = {"attention.sliding_window": "sliding_window"}
_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_SECTIONS = ("rope.dimension_sections", "n_deepstack_layers")  # of positions in images
_GRANITE = Architecture(
    "GraniteForCausalLM",
    interleaved=True,
    fields={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    tables=(DIVISORS,),
    complete=_granite,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", interleaved=True, tables=(DIVISORS,), complete=_llama
    ),
    "mistral3": Architecture(
        "MistralForCausalLM", interleaved=True, tables=(DIVISORS,), complete=_mistral3
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", harmless=_SECTIONS),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM", harmless=_SECTIONS),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        fields=_EXPERT_WIDTH
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        bias="qkv_bias",
        complete=_qwen2moe,
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", fields=_EXPERT_WIDTH, complete=_qwen3moe),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", fields=_EXPERT_WIDTH, harmless=_SECTIONS, complete=_qwen3moe
    ),
    "olmoe": Architecture("OlmoeForCausalLM", complete=_experts),
    "gemma": Architecture("GemmaForCausalLM", shifted_norms=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        fields=_WINDOW | _CAPS,
        names=_NORMS,
        shifted_norms=True,
        complete=_gemma_windows(2, 4096, 46),
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        fields=_WINDOW | _CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        names=_NORMS,
        shifted_norms=True,
        complete=_gemma_windows(6, 0, 62),
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        fields=_WINDOW
        | _EXPERT_WIDTH
        | {
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_used_count": "top_k_experts",
        },
        names=_NORMS,
        tables=(DIVISORS,),
        complete=_gemma4,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        names={"post_attention_layernorm": "post_attention_norm"},
        scaling={"truncate": False},
        complete=_gpt_oss,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        fields=_WINDOW
        | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        tables=(LONG, SHORT),
        complete=_phi3,
    ),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, name="GraniteMoeForCausalLM", complete=_granitemoe),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True, tables=(DIVISORS,)),
}
"""By `general.architecture`."""
