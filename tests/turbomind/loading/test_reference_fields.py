"""Fields of a config.json: the reference's are read or refused, others are ignored."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import ASSETS, asset
from checkpoints import MODELS, TINY, make_config, make_model, reference_logits

from turbomind import ModelError, describe
from turbomind.models import FAMILIES, Description, family_of
from turbomind.models.reference import TABLE, fields_read, rope_fields_read
from turbomind.models.rope import TYPES

ROOT = Path(__file__).resolve().parents[3]
NAMES = {family: name for name, (family, _) in MODELS.items()}  # a variant of each family
# Values that no default has; of other fields it follows from the default.
OTHERS: dict[str, Any] = {
    "attention_chunk_size": 64, "attn_logit_softcapping": 7.0, "clip_qkv": 8.0, "head_dim": 34,
    "final_logit_softcapping": 7.0, "hidden_act": "relu", "hidden_activation": "relu",
    "kv_sharing_modes": ["reuse"], "layer_types": ["chunked_attention"], "mlp_only_layers": [1],
    "moe_intermediate_size": 8, "no_rope_layers": [0] * 9, "num_experts": 3,
    "num_global_key_value_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3,
    "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"num_attention_heads": 1}}, "rope_local_base_freq": 500.0,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "rope_scaling": {"rope_type": "linear", "factor": 3.0}, "sliding_window": 7,
    "top_k_experts": 1, "use_bidirectional_attention": "all",
}  # fmt: skip
# Fields that mean nothing without another one, which these tests do not set.
CONDITIONAL = {
    "global_head_dim", "max_window_layers", "moe_intermediate_size", "no_rope_layer_interval",
    "num_experts", "num_global_key_value_heads", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_local_base_freq", "sliding_window", "sliding_window_pattern",
    "tie_word_embeddings", "top_k_experts", "rope_scaling", "rope_theta", "use_double_wide_mlp",
    "use_sliding_window", "intermediate_size", "vocab_size_per_layer_input",
}  # fmt: skip
# Names that some other model reads, or none.
ALIEN: dict[str, Any] = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2,
    "attention_multiplier": 0.3, "use_qk_norm": True, "qk_layernorm": True, "qkv_bias": False,
    "mlp_bias": True, "bias": True, "lm_head_bias": True, "sliding_window_size": 8,
    "swiglu_limit": 1.0, "swiglu_alpha": 1.0, "clip_qkv": 0.1, "attn_logit_softcapping": 0.1,
    "final_logit_softcapping": 0.1, "query_pre_attn_scalar": 9.0, "rope_interleaved": True,
    "no_rope_layers": [0] * 9, "rotary_pct": 0.25, "shared_expert_intermediate_size": 8,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "kv_lora_rank": 8, "use_post_norm": True,
    "parallel_residual": True, "attention_sinks": True, "num_kv_shared_layers": 1,
    "dual_chunk_attention_config": {"chunk_size": 8}, "max_window_layers": 1, "block_types": ["x"],
    "initial_context_length": 64, "experts_per_token": 1, "cache_implementation": "hybrid",
    "decoder_sparse_step": 2, "mlp_only_layers": [0], "my_trainer_note": "x",
    "norm_topk_prob": False, "use_mrope": True, "scale_depth": 1.4, "attention_bias": True,
}  # fmt: skip

WITHOUT_EFFECT: dict[str, Any] = {
    "attention_dropout": 0.5, "output_router_logits": True, "router_aux_loss_coef": 3.0,
    "pretraining_tp": 2, "use_cache": False, "router_jitter_noise": 0.5, "resid_pdrop": 0.5,
    "embd_pdrop": 0.5, "bos_token_id": 7, "eos_token_id": 8, "initializer_range": 0.3,
}  # fmt: skip


def read(values: dict[str, Any]) -> Description:
    return family_of(values).describe(values)


def saved(name: str) -> dict[str, Any]:
    if name == "internlm2":
        names = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
        return {**TINY, **names, "bias": False}
    values: dict[str, Any] = json.loads(make_config(*MODELS[name]).to_json_string())
    return values


def attempt(reader: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> tuple[Any, str]:
    """Returns what a reader makes of a config, and the error with which it refuses it."""
    try:
        return reader(values), ""
    except ModelError as error:
        return None, str(error)


def text_of(values: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = values.get("text_config", values)
    return text


def test_the_table_is_that_of_the_installed_reference() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference_fields
    finally:
        sys.path.remove(str(ROOT / "tools"))
    pinned = next(
        line.partition("==")[2].strip()
        for line in (ROOT / "requirements" / "test.txt").read_text().splitlines()
        if line.startswith("transformers==")
    )
    if metadata.version("transformers") != pinned:
        pytest.skip(f"needs transformers {pinned}, which the table is of")
    content, table = reference_fields.read_all(), json.loads(TABLE.read_text())
    if content["versions"]["gguf"] != table["versions"]["gguf"]:
        content |= {name: table[name] for name in ("versions", "gguf_keys")}
    assert content == table
    assert reference_fields.document(table) + "\n" == TABLE.read_text()


@pytest.mark.parametrize("name", [*NAMES.values(), "internlm2"])
def test_no_field_that_the_reference_reads_is_ignored(name: str) -> None:
    """Another value than the default changes the description, or is refused by name."""
    values = saved(name)
    family = family_of(values)
    plain, text = family.describe(values), text_of(values)
    reads = fields_read(family.model_type)
    assert not {each for each in family.unknown_fields if each in reads}
    for field in reads:
        kept = text.get(field)
        other = OTHERS.get(field)
        if other is None or other == kept:
            other = not kept if isinstance(kept, bool) else kept + 1 if kept else 1
        text[field] = other
        changed, error = attempt(family.describe, values)
        named = any(each in error for each in reads)
        assert named if error else changed != plain or field in CONDITIONAL, field
        assert field not in family.unknown_fields
        text[field] = kept
    assert family.describe(values) == plain


def test_fields_of_rotations_that_the_reference_reads_are_read() -> None:
    values = {
        "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": 64, "attention_factor": 1.1,
        "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.9, "mscale_all_dim": 0.8,
        "truncate": False, "partial_rotary_factor": 1.0, "rope_theta": 500.0,
    }  # fmt: skip
    for kind in TYPES:
        reads = {name: values[name] for name in rope_fields_read(kind)}
        family = family_of(TINY)
        family.describe({**TINY, "rope_scaling": {"rope_type": kind, **reads}})
        assert family.unknown_fields == ()
        family.describe({**TINY, "rope_scaling": {"rope_type": kind, **values}})
        left = {f"rope_scaling.{name}" for name in values.keys() - reads.keys()}
        # This one is refused, also where the reference does not read it.
        assert {*family.unknown_fields} == left - {"rope_scaling.partial_rotary_factor"}


@pytest.mark.parametrize("name", NAMES.values())
def test_fields_that_do_not_count_change_nothing_in_the_reference(name: str) -> None:
    kind, changes = MODELS[name]
    values = saved(name)
    family = family_of(values)
    plain, reads = family.describe(values), fields_read(family.model_type)
    ignored = {field: value for field, value in ALIEN.items() if field not in reads}
    text_of(values).update(ignored | WITHOUT_EFFECT)
    assert family.describe(values) == plain
    assert {*ignored} <= {*family.unknown_fields}
    assert not {*family.unknown_fields} & {*WITHOUT_EFFECT}

    model, other = (
        make_model(kind, {**changes, **more}) for more in ({}, ignored | WITHOUT_EFFECT)
    )
    other.load_state_dict(model.state_dict())
    ids = [3, 5, 8, 13, 21, 34, 55, 89, 90, 1] * 6
    assert np.array_equal(reference_logits(model, ids), reference_logits(other, ids))


# Of published checkpoints, the fields of which some guess would be wrong.
PUBLISHED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Qwen3-Coder-30B-A3B-Instruct": (
        "qwen3_moe",
        {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0,
         "max_window_layers": 62, "router_aux_loss_coef": 0.0, "rope_scaling": None},
        ("use_qk_norm", "qkv_bias", "shared_expert_intermediate_size", "max_window_layers"),
    ),
    "gemma-2-9b": (
        "gemma2", {"sliding_window_size": 4096, "hidden_act": "gelu_pytorch_tanh"},
        ("sliding_window_size", "hidden_act"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_load(name: str) -> None:
    variant, fields, ignored = PUBLISHED[name]
    values = saved(variant) | fields
    family = family_of(values)
    assert family.describe(values) == read(saved(variant))
    assert family.unknown_fields == ignored


def test_a_scaling_with_a_factor_of_another_engine_is_that_of_the_reference() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has it; transformers does not read it."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    family = family_of(TINY)
    model = family.describe({**TINY, "rope_scaling": {**yarn, "attn_factor": 0.8782488562869419}})
    assert model == read({**TINY, "rope_scaling": yarn})
    assert family.unknown_fields == ("rope_scaling.attn_factor",)


def test_leftovers_beside_a_default_rotation_are_ignored() -> None:
    sections = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
    for more in ({}, {"factor": 4.0}, {"finetuned": True}):
        assert read({**TINY, "rope_scaling": sections | more}) == read(TINY)


def test_the_new_one_of_two_types_counts() -> None:
    """Fine-tunes of Qwen2.5-VL's language model have "mrope" in the older field."""
    linear = {"rope_type": "linear", "factor": 2.0}
    model = read({**TINY, "rope_scaling": linear})
    assert read({**TINY, "rope_scaling": {**linear, "type": "mrope"}}) == model
    assert read({**TINY, "rope_scaling": {"type": "linear", "factor": 2.0}}) == model
    for wrong in ({"type": "mrope"}, {"rope_type": "mrope", "type": "linear", "factor": 2.0}):
        error = attempt(read, {**TINY, "rope_scaling": wrong})[1]
        assert "type is 'mrope', expected 'default' or 'linear'" in error


def test_the_inner_of_two_partial_rotations_counts() -> None:
    """transformers 5 saves Phi-4-mini with the field at both places."""
    values = saved("phi3_longrope")
    share = values["rope_parameters"]["partial_rotary_factor"]
    for outer in (share, 0.5, 1.0):
        family = family_of(values)
        assert family.describe(values | {"partial_rotary_factor": outer}) == read(values)
        assert family.unknown_fields == ()
    assert read({**TINY, "partial_rotary_factor": 1.0}) == read(TINY)


def test_absent_fields_are_those_of_the_reference() -> None:
    """A config without its optional fields has the reference's defaults."""
    import transformers

    for kind in FAMILIES:
        for architecture, model_type in kind.names.items():
            if model_type == "internlm2":
                continue
            sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 6,
                     "vocab_size": 262144, "intermediate_size": 40}  # fmt: skip
            values = {"architectures": [architecture], "model_type": model_type, **sizes}
            full = transformers.CONFIG_MAPPING[model_type](**sizes)
            full.architectures = [architecture]
            written = json.loads(full.to_json_string())
            assert read(values) == read(
                written | {"max_position_embeddings": read(values).max_context}
            )


def test_real_configs_load_or_are_refused_for_a_documented_reason() -> None:
    asset("configs/hf")
    models, limits = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("models", "limits"))
    refused = []
    for path in sorted((ASSETS / "configs" / "hf").glob("*.json")):
        values = json.loads(path.read_text())
        method = values.get("quantization_config", {}).get("quant_method", "")
        is_listed = f"`{values['architectures'][0]}`" in models
        _, error = attempt(family_of, values)
        if error:
            refused.append(path.stem)
            assert not is_listed or (method in error and method.upper() in limits), error
        else:
            describe(path)
            assert is_listed, path
            assert method.upper() in models, path
    assert refused == ["deepseek_v3", "glm4_9b", "qwen3_8b_fp8"]


def test_fields_that_are_refused_are_documented() -> None:
    """docs/limits.md names every field of which one value alone is supported."""
    limits = (ROOT / "docs" / "limits.md").read_text()
    for kind in FAMILIES:
        family = kind("")
        values = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6,
                  "num_key_value_heads": 2, "vocab_size": 70, "hidden_size_per_layer_input": 0,
                  "num_experts_per_tok": 2, "intermediate_size": 40}  # fmt: skip
        family.describe(values)
        for field in fields_read(family.model_type):
            if field in values:
                continue
            _, error = attempt(family.describe, {**values, field: OTHERS.get(field, "x")})
            if error.endswith(("or nothing", "is not supported")):
                assert f"`{field}`" in limits, (family.model_type, error)
