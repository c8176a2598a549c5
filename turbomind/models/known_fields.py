"""What is known about fields of config.json that a family does not read.

Three lists decide about such a field: it is harmless, or it changes the arithmetic of some family
and is refused unless its value is neutral, or it is unknown. The reference implementations ignore
unknown fields, so they are accepted and reported (`ModelInfo.unknown_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "architectures",
        "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map",
        "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
        "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
        "dtype", "early_stopping", "embd_pdrop", "embedding_dropout",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
        "ffn_dropout", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "hidden_dropout", "hidden_dropout_prob", "id2label", "initializer_range", "is_decoder",
        "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length",
        "max_sequence_length", "max_window_layers", "min_length", "model_max_length",
        "model_type", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
        "output_router_logits", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
        "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop",
        "residual_dropout", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
        "router_jitter_noise", "sep_token_id", "seq_length", "suppress_tokens",
        "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version",
        "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
        "use_cache", "use_flash_attention", "use_flash_attn",
    }
)  # fmt: skip
"""Fields that cannot change the logits of a decoder at inference: provenance, training, output
options of the library that wrote the file, and generation defaults."""

NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
    "use_qk_norm": False,
    "use_sliding_window": False,
}
"""Fields whose only supported value is the one that changes nothing."""

_NONE: tuple[Any, ...] = ([], {}, False)
_ONE: tuple[Any, ...] = (1,)
_ZERO: tuple[Any, ...] = (0, False)

ARITHMETIC: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r".*multiplier.*", _ONE),
    (r".*soft_?cap.*|.*clip.*|.*swiglu_limit.*", _ZERO),
    (r".*scal(e|ar|ing|es)(_.*|$)|scale_.*|dim_model_base", _ONE),
    (r".*rotary.*|(.*_)?(rope|nope|alibi|yarn)(_.*)?|position_embedding.*", _NONE),
    (r".*expert.*|.*moe.*|.*router.*|.*top_?k_(method|group|prob)|norm_topk.*|n_group", _ZERO),
    (r"first_k_dense.*|decoder_sparse_step|mlp_only_layers|shared_.*|num_nextn.*", _NONE + _ZERO),
    (r".*layers?_types?.*|.*layers?_pattern.*|.*block_types?.*|attn_type_list", _NONE),
    (r".*sliding.*|.*window.*|.*dual_chunk.*|attention_chunk_size|.*sinks?(_.*|$)", _NONE + _ZERO),
    (r".*quant.*|compression_config", _NONE),
    (r"(.*_)?(q|k|kv|qk|v)_?(lora|norm|layernorm|proj)(_.*)?|.*latent.*", _NONE + _ZERO),
    (r".*(mamba|recurrent|delta_?net).*|(.*_)?(ssm|conv|conv1d)(_.*)?", _NONE + _ZERO),
    (r"linear_(attn|num|key|value)(_.*)?|attn_temperature.*", _NONE + _ZERO),
    (r".*parallel_(residual|attn|block).*|(.*_)?(post|pre|sandwich|zero_centered)_.*norm.*", _NONE),
    (r"norm_(type|class|head)|.*layernorm.*|.*rms_?norm.*|.*norm_(before|after|bias).*", _NONE),
    (r"(use_|add_|.*_use_|lm_head_|no_)?bias(_.*)?|.*_bias", _NONE),
    (r"hidden_activation|activation(_.*)?|act_fn|ffn_act.*|gated_.*|.*_act(_fn)?", ()),
    (r".*head_dim.*|.*_dim_(head|per_head)|num_.*heads.*|.*kv_heads.*|multi_query.*", ()),
    (r".*tie_.*embedding.*|.*per_layer.*|.*altup.*|.*laurel.*", _NONE + _ZERO),
    (r".*kv_shared.*|.*cross_layer.*|.*share_.*|.*k_eq_v.*", _NONE + _ZERO),
    (r"use_bidirectional.*|swiglu_.*", _NONE + _ZERO),
    (r"(vision|audio|text|speech|thinker|talker)_config|image_.*|audio_.*", ()),
)  # fmt: skip
"""Names of fields that change the arithmetic of some family, as regular expressions of the whole
name, with the values that change nothing. They cover multipliers, caps, positions, experts, layer
types, windows, quantization, other attentions and recurrences, norms, biases, activations, shapes
and other modalities."""

_ARITHMETIC = tuple((re.compile(name, re.IGNORECASE), neutral) for name, neutral in ARITHMETIC)


def neutral_values(name: str) -> tuple[Any, ...] | None:
    """Returns the values of a field that change no arithmetic; None for an unknown field."""
    if name in NEUTRAL:
        return (NEUTRAL[name],)
    found = [neutral for pattern, neutral in _ARITHMETIC if pattern.fullmatch(name)]
    return tuple(value for neutral in found for value in neutral) if found else None


def is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Returns whether the value is neutral. True is not 1, and False is not 0."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )
