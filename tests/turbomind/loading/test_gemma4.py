"""Configs of Gemma 4: what differs between layers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turbomind import ModelError, describe
from turbomind.models import Description, Experts, family_of

_FULL, _LOCAL = "full_attention", "sliding_attention"
# As the files of a hub have it: the fields that most sizes share.
TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        _FULL: {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        _LOCAL: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
E2B = TEXT | {
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": 7 * (4 * [_LOCAL] + [_FULL]),
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_double_wide_mlp": True,
}
LARGE = TEXT | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": 10 * (5 * [_LOCAL] + [_FULL]),
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}

SPARSE = LARGE | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": 5 * (5 * [_LOCAL] + [_FULL]),
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}


def wrapped(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 258881,
        "boi_token_id": 255999,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    }


def read(text: dict[str, Any], **changes: Any) -> Description:
    values = {"architectures": ["Gemma4ForCausalLM"], **text, **changes}
    return family_of(values).describe(values)


@pytest.mark.parametrize(
    ("text", "parameters", "kv_values"),
    [(LARGE, 30_697_345_340, 2 * (50 * 16 * 256 + 10 * 4 * 512)),
     (E2B, 4_628_569_379, 2 * (12 * 256 + 3 * 512)),
     (SPARSE, 25_233_141_790, 2 * (25 * 8 * 256 + 5 * 2 * 512))],
    ids=["31B", "E2B", "26B-A4B"],
)  # fmt: skip
def test_the_sizes_are_those_that_are_published(
    text: dict[str, Any], parameters: int, kv_values: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(wrapped(text)))
    info = describe(tmp_path)
    assert info.parameters == parameters  # without the encoders
    assert info.kv_bytes_per_token == 2 * kv_values
    assert (info.dtype, info.eos_token_ids, info.encoders) == ("bfloat16", (1, 106), ("vision",))
    assert info.unknown_fields == ()
    d = info.description
    assert (d.tied_head, d.norm_offset, d.final_softcap) == (True, 0.0, 30.0)
    # Rows of the table of per-layer inputs are looked up; a step reads no more of it.
    table = 2 * d.vocab * len(d.layers) * d.per_layer
    many = info.step_weight_bytes(10_000)  # tokens, which take every expert
    assert 0.99 * (info.weight_bytes - table) < many < info.weight_bytes - table


def test_experts_are_beside_the_mlp_of_every_layer() -> None:
    d = read(SPARSE)
    experts = Experts(128, 8, 704, True, scaled=True, own_norms=True)
    assert {(layer.experts, layer.intermediate) for layer in d.layers} == {(experts, 2112)}
    # The fields without the flag mean nothing, as in the reference.
    assert all(layer.experts is None for layer in read(SPARSE, enable_moe_block=False).layers)
    unified = {
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "model_type": "gemma4_unified_text",
        "hidden_size_per_layer_input": None,
        "vocab_size_per_layer_input": None,
    }
    # The reference of the 12B does not read the flag.
    assert all(layer.experts is None for layer in read(SPARSE | unified).layers)


def test_layers_of_full_attention_have_other_heads() -> None:
    d = read(LARGE)
    local, full = d.layers[4], d.layers[5]
    assert (local.head_dim, local.kv_heads, local.window, local.rope) == (256, 16, 1024, 1)
    assert (full.head_dim, full.kv_heads, full.window, full.rope) == (512, 4, 0, 0)
    assert (local.k_eq_v, full.k_eq_v) == (False, True)
    assert all(x.attn_scale == 1 and x.v_norm and x.qk_norm and x.scaled for x in d.layers)
    # Without that flag the number of heads is that of all layers, as in the reference.
    assert read(LARGE, attention_k_eq_v=False).layers[5].kv_heads == 16
    # The first quarter of the frequencies of a head is rotated.
    assert len(d.rope.inv_freq) == 256
    assert len(d.other_ropes[0].inv_freq) == 128
    assert np.allclose(d.rope.inv_freq[:64], 1e6 ** (-np.arange(64) / 256), rtol=1e-6)
    assert not np.any(d.rope.inv_freq[64:])


def test_newer_files_have_the_heads_by_layer() -> None:
    old = {name: value for name, value in LARGE.items() if "global" not in name}
    by_layer = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert read(old, per_layer_config=by_layer) == read(LARGE)
    for wrong in (
        {},
        {"5": by_layer["5"]},
        by_layer | {"4": by_layer["5"]},
        by_layer | {"5": {"head_dim": 256}},
        by_layer | {"5": 512},
        list(by_layer.values()),
    ):
        with pytest.raises(ModelError, match="per_layer_config is .*, expected equal objects"):
            read(old, per_layer_config=wrong)
    odd = {name: value | {"rope_theta": 5} for name, value in by_layer.items()}
    with pytest.raises(ModelError, match="per_layer_config: rope_theta is 5"):
        read(old, per_layer_config=odd)


def test_the_last_layers_read_the_kv_of_earlier_ones() -> None:
    layers = read(E2B).layers
    assert all(layer.kv_layer == -1 for layer in layers[:15])
    assert {layer.kv_layer for layer in layers[15:] if layer.window} == {13}
    assert {layer.kv_layer for layer in layers[15:] if not layer.window} == {14}
    assert [layer.intermediate for layer in layers] == 15 * [6144] + 20 * [2 * 6144]
    family = family_of(wrapped(E2B))
    d = family.describe(wrapped(E2B))
    slots = dict(family.slots(d))
    assert [rows.count for rows in slots["layers.15.qkv"]] == [8 * 256]
    assert "layers.15.k_norm" not in slots
    assert "layers.14.k_norm" in slots
    # The hub's file has their projections all the same.
    assert family.ignored_tensor("model.layers.15.self_attn.k_proj.weight", d)
    assert not family.ignored_tensor("model.layers.14.self_attn.k_proj.weight", d)
    assert not family.ignored_tensor("model.layers.35.self_attn.k_proj.weight", d)


def test_absent_fields_have_the_values_of_the_reference() -> None:
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text"},
    }
    d = family_of(config).describe(config)
    assert (d.hidden, d.vocab, d.max_context, d.per_layer) == (2304, 262144, 131072, 256)
    assert [i for i, layer in enumerate(d.layers) if not layer.window] == [5, 11, 17, 23, 29]
    assert {(x.head_dim, x.kv_heads) for x in d.layers} == {(256, 4), (512, 4)}
    assert d.tied_head
    assert d.layers[0].window == 512
    text = {"model_type": "gemma4_unified_text", "layer_types": 30 * [_LOCAL]}
    config = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "model_type": "gemma4_unified",
        "text_config": text,
    }
    d = family_of(config).describe(config)
    assert (d.max_context, d.per_layer, d.layers[0].window) == (262144, 0, 1024)
    assert [i for i, layer in enumerate(d.layers) if not layer.window] == [29]  # always full


_MOE = {
    "enable_moe_block": True,
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "top_k_experts": 2,
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"enable_moe_block": True}, "num_experts is None, expected an integer from 1 to 1024"),
        (_MOE | {"top_k_experts": 9}, "top_k_experts is 9, expected at most the number of experts"),
        (_MOE | {"top_k_experts": None}, "top_k_experts is None, expected an integer from 1 to 32"),
        (_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31, expected a layer of each type"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9, expected vocab_size"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*'full_attention'"),
        ({"rope_parameters": {_FULL: {"rope_type": "yarn"}}}, "rope_type is 'yarn', expected 'def"),
        ({"rope_theta": 2e4}, "rope_theta is 20000.0, expected 10000.0 or nothing"),
        ({"global_head_dim": 2048}, "global_head_dim is 2048"),
        ({"global_head_dim": 511}, "global_head_dim is 511, expected an even number"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read(E2B, **changes)
