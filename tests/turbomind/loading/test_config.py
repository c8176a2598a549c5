"""config.json: real ones are read, rotations equal transformers', other fields are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import asset
from checkpoints import MODELS, SMALL, TINY, make_config

from turbomind import Engine, InvalidRequest, ModelError, NotFound, describe
from turbomind.loading.loader import fingerprint, unknown_fields_note
from turbomind.models import Description, Experts, family_of

# file -> (vocab, hidden, layers, heads, kv_heads, head_dim, intermediate, context, tied, qkv_bias)
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "gemma3_text": (262144, 1152, 26, 4, 1, 256, 6912, 32768, True, False),
    "gemma_2_2b_it": (256000, 2304, 26, 8, 4, 256, 9216, 8192, True, False),
    "gpt_oss_20b": (201088, 2880, 24, 64, 8, 64, 0, 131072, False, True),
    "internlm2_7b": (92544, 4096, 32, 32, 8, 128, 14336, 32768, False, False),
    "llama3_1_8b_instruct": (128256, 4096, 32, 32, 8, 128, 14336, 131072, False, False),
    "llama3_2_1b": (128256, 2048, 16, 32, 8, 64, 8192, 131072, True, False),
    "llama3_2_3b": (128256, 3072, 28, 24, 8, 128, 8192, 131072, True, False),
    "mistral_7b_instruct": (32000, 4096, 32, 32, 8, 128, 14336, 32768, False, False),
    "mixtral": (32000, 4096, 32, 32, 8, 128, 0, 32768, False, False),
    "mistral_7b_instruct_v0.3": (32768, 4096, 32, 32, 8, 128, 14336, 32768, False, False),
    "phi3": (32064, 3072, 32, 32, 32, 96, 8192, 131072, False, False),
    "phi4_14b": (100352, 5120, 40, 40, 10, 128, 17920, 16384, False, False),
    "qwen2.5_0.5b": (151936, 896, 24, 14, 2, 64, 4864, 32768, True, True),
    "qwen2.5_7b": (152064, 3584, 28, 28, 4, 128, 18944, 131072, False, True),
    "qwen3_30b": (151936, 2048, 48, 32, 4, 128, 0, 40960, False, False),
    "qwen3_4b": (151936, 2560, 36, 32, 8, 128, 9728, 40960, True, False),
    "qwen3_8b": (151936, 4096, 36, 32, 8, 128, 12288, 40960, False, False),
}
REFUSED = {
    "deepseek_v3": "DeepseekV3ForCausalLM.*never run",
    "glm4_9b": "ChatGLMModel.*never run",
    "qwen3_8b_fp8": "quantization_config.*fp8",
}


def read(values: dict[str, Any], rope_length: int | None = None) -> Description:
    return family_of(values).describe(values, rope_length)


def real(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(asset(f"configs/hf/{name}.json").read_text())
    return values


@pytest.mark.parametrize("name", ACCEPTED)
def test_real_configs_are_read_right(name: str) -> None:
    d = read(real(name))
    layer = d.layers[0]
    assert (
        d.vocab,
        d.hidden,
        len(d.layers),
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.intermediate,
        d.max_context,
        d.tied_head,
        layer.qkv_bias,
    ) == ACCEPTED[name]
    if not name.startswith(("gemma", "gpt_oss")):
        assert all(other == layer for other in d.layers)
        assert layer.window == 0
    assert layer.qk_norm == name.startswith(("qwen3", "gemma3"))
    assert d.norm_eps == real(name)["rms_norm_eps"]


def test_real_experts_are_read_right() -> None:
    assert read(real("mixtral")).layers[0].experts == Experts(8, 2, 14336, True)
    assert read(real("qwen3_30b")).layers[0].experts == Experts(128, 8, 768, True)
    biased = Experts(32, 4, 2880, True, router_bias=True, bias=True)
    assert read(real("gpt_oss_20b")).layers[0].experts == biased
    # As their model cards count.
    assert describe(asset("configs/hf/gpt_oss_20b.json")).parameters == 20_914_757_184
    assert describe(asset("configs/hf/mixtral.json")).parameters == 46_702_792_704
    assert describe(asset("configs/hf/qwen3_30b.json")).parameters == 30_532_122_624


@pytest.mark.parametrize("name", REFUSED)
def test_real_configs_of_other_families_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        read(real(name))


@pytest.mark.parametrize("name", ["qwen3_8b", "llama3_2_1b"])
def test_weight_names_are_those_of_real_checkpoints(name: str) -> None:
    table = {
        "qwen3_8b": "Qwen3-14B",
        "llama3_2_1b": "Meta-Llama-3-8B-Instruct",
    }[name]
    checkpoint = json.loads(asset(f"configs/checkpoints/{table}.json").read_text())
    config = {**checkpoint["config"], "architectures": real(name)["architectures"]}
    config["model_type"] = real(name)["model_type"]
    d = read(config)
    ours = {(r.tensor, r.shape) for _, rows in family_of(config).slots(d) for r in rows}
    theirs = set()
    for tensor in checkpoint["tensors"]:
        shape = tuple(tensor["shape"])
        layers = range(checkpoint["layers"]) if "{L}" in tensor["name"] else [0]
        theirs |= {(tensor["name"].replace("{L}", str(i)), shape) for i in layers}
    assert ours == theirs


def transformers_config(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**{**SMALL, **changes})


def reference_rope(config: Any, seq_len: int | None = None) -> tuple[np.ndarray, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        table, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        if kind == "longrope" and seq_len is None:
            seq_len = config.max_position_embeddings
        table, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
    return table.numpy(), factor


def units_apart(ours: Any, theirs: np.ndarray) -> int:
    """Returns the largest difference in units of the last place of float32."""
    whole = np.asarray(ours, np.float32).view(np.int32).astype(np.int64)
    return int(np.abs(whole - theirs.view(np.int32)).max())


def check_rope(d: Description, config: Any, seq_len: int | None = None) -> None:
    table, factor = reference_rope(config, seq_len)
    # The reference's float32 power is itself off by one now and then; a scaling rounds once more.
    assert units_apart(d.rope.inv_freq, table) <= (
        1 if config.rope_parameters["rope_type"] == "default" else 2
    )
    assert d.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def reference_tables(config: Any) -> Any:
    """Returns the reference's tables of layers with full attention and with windows."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    old = config.model_type == "gemma3_text"
    return (Gemma3RotaryEmbedding if old else Gemma4TextRotaryEmbedding)(config)


@pytest.mark.parametrize("name", MODELS)
def test_configs_that_transformers_saves_are_read(name: str, tmp_path: Path) -> None:
    config = make_config(*MODELS[name])
    config.save_pretrained(tmp_path)
    info = describe(tmp_path)
    d = info.description
    tied = config.tie_word_embeddings
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    for i, layer in enumerate(d.layers):
        sliding = kinds is None or kinds[i] == "sliding_attention"
        assert layer.window == (window if sliding and window < d.max_context else 0)
    by_layer = getattr(config, "per_layer_config", None) or [config] * len(d.layers)
    for i, layer in enumerate(d.layers):
        own = by_layer[i]
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        assert (layer.head_dim, layer.kv_heads) == (head_dim, own.num_key_value_heads)
    assert (d.hidden, d.vocab) == (config.hidden_size, config.vocab_size)
    assert d.tied_head == tied
    assert info.eos_token_ids == (2,)
    if not d.other_ropes:
        check_rope(d, config)
    else:
        tables = reference_tables(config)
        for rope, kind in ((d.rope, "full_attention"), (d.other_ropes[0], "sliding_attention")):
            assert units_apart(rope.inv_freq, getattr(tables, f"{kind}_inv_freq").numpy()) <= 2


ROPES: list[dict[str, Any]] = [
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "beta_fast": 32,
     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7, "finetuned": True},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 128},
    {"type": "dynamic", "factor": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("scaling", ROPES, ids=lambda s: s.get("type") or s["rope_type"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000])
def test_rope_tables_are_those_of_transformers(
    scaling: dict[str, Any], head_dim: int, theta: float
) -> None:
    """Returns the fields in the form of older files: rope_theta beside rope_scaling."""
    values = {**TINY, "head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling}
    config = transformers_config(
        "Llama",
        {
            "head_dim": head_dim,
            "max_position_embeddings": TINY["max_position_embeddings"],
            "rope_theta": theta,
            "rope_scaling": dict(scaling),
        },
    )
    check_rope(read(values), config)


def test_dynamic_ntk_at_a_fixed_length_is_that_of_transformers() -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    values = {**TINY, "rope_scaling": scaling}
    config = transformers_config("Llama", {"max_position_embeddings": 256, "head_dim": 16})
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    plain, long = read(values), read(values, 1000)
    assert (plain.max_context, long.max_context) == (256, 1000)
    check_rope(long, config, 1000)
    assert plain.rope.inv_freq == read(TINY).rope.inv_freq != long.rope.inv_freq
    for wrong in (255, 0, -1, "1000", True, 2.5e3):
        with pytest.raises(InvalidRequest, match="rope_length"):
            read(values, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="rope_length.*'default'"):
        read(TINY, 1000)


def test_scaled_rotations_extend_the_context() -> None:
    def context(scaling: dict[str, Any], positions: int) -> int:
        return read(
            {**TINY, "max_position_embeddings": positions, "rope_scaling": scaling}
        ).max_context

    llama3 = ROPES[5] | {"original_max_position_embeddings": 8192}
    assert context({"type": "linear", "factor": 4.0}, 4096) == 16384
    assert context(llama3, 131072) == 131072
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert context(yarn, 32768) == 131072  # as Qwen2.5's and Qwen3's model cards switch it on
    assert context(yarn, 40960) == 131072
    assert context(yarn, 131072) == 131072


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": -4}, "hidden_size is -4, expected an integer from 1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"hidden_size": 33}, "hidden_size is 33, expected a multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 4}, "divisor of num_att"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"head_dim": 2048}, "head_dim is 2048, expected an integer from 1 to 1024"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        ({"vocab_size": []}, r"vocab_size is \[\]"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "long_factor is absent, expected 8",
        ),
        ({"rope_scaling": {"type": "proportional"}}, "type is 'proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is absent"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, expected False or nothing"),
        ({"is_causal": False}, "is_causal is False, expected True or nothing"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size is 8192, expected nothing"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config is .*, expected nothing"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.*hqq"),
        ({"architectures": ["A", "B"]}, "architectures is"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', expected 'llama'"),
    ],
)
def test_wrong_and_unsupported_fields_are_refused_by_name(
    changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ModelError, match=match):
        read({**TINY, **changes})


def test_harmless_fields_are_accepted() -> None:
    plain = read(TINY)
    assert plain == read(
        {
            **TINY,
            "architectures": None,
            "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
            "use_cache": False,
            "attention_dropout": 0.1,
            "pretraining_tp": 4,
            "id2label": {"0": "A"},
            "is_encoder_decoder": False,
            "sliding_window": None,
            "use_sliding_window": False,
            "hidden_act": "swish",
            "unheard_of": None,
            "transformers_version": "9.9",
        }
    )


SMOLLM2 = {
    # The fields of SmolLM2-135M-Instruct that are not those of every Llama.
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "pad_token_id": 2,
}


def test_fields_that_the_reference_does_not_read_are_ignored_and_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **SMOLLM2, "my_trainer_note": 1}))
    info = describe(tmp_path)
    assert info.description == read(TINY)
    unknown = (
        "is_llama_config", "rope_interleaved", "transformers.js_config", "my_trainer_note"
    )  # fmt: skip
    assert info.unknown_fields == unknown
    assert all(name in unknown_fields_note(info) for name in unknown)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert describe(tmp_path).unknown_fields == ()


def test_an_engine_warns_once_of_ignored_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "my_trainer_note": 1}))
    options: dict[str, Any] = {"load_format": "dummy", "threads": 1, "cache_memory": "2MiB"}
    with caplog.at_level(logging.WARNING):
        Engine(tmp_path, device="cpu", **options).close()
    assert [r.message for r in caplog.records if "my_trainer_note" in r.message] == [
        f"{tmp_path}: config.json has fields that LlamaForCausalLM does not read, ignored: "
        "my_trainer_note"
    ]


def test_windows_are_those_of_the_reference() -> None:
    mistral = {**TINY, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read({**mistral, "sliding_window": 32}).layers[0].window == 32
    assert read({**mistral, "sliding_window": None}).layers[0].window == 0
    # A window as long as the context is full attention; absent means 4096 in this family.
    assert read({**mistral, "sliding_window": 256}).layers[0].window == 0
    assert read({**mistral, "max_position_embeddings": 8192}).layers[0].window == 4096
    qwen = {
        **TINY,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "sliding_window": 100,
        "max_window_layers": 2,
    }
    assert [x.window for x in read(qwen).layers] == [0] * 4
    on = {**qwen, "use_sliding_window": True}
    assert [x.window for x in read(on).layers] == [0, 0, 100, 100]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert [x.window for x in read({**on, "layer_types": kinds}).layers] == [100, 0, 100, 0]
    with pytest.raises(ModelError, match="layer_types"):
        read({**qwen, "layer_types": kinds})
    with pytest.raises(ModelError, match="layer_types"):
        read({**on, "layer_types": kinds[:3]})


def test_dtypes_follow_from_option_config_and_device(tmp_path: Path) -> None:
    def info(**changes: Any) -> tuple[str, str]:
        values = {k: v for k, v in TINY.items() if k != "torch_dtype"}
        options = {k: changes.pop(k) for k in ("kv_dtype",) if k in changes}
        if "ours" in changes:
            options["dtype"] = changes.pop("ours")
        (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
        found = describe(tmp_path, **options)
        return found.dtype, found.kv_dtype

    assert info() == ("bfloat16", "bfloat16")
    assert info(torch_dtype="float32") == ("float32", "float32")
    assert info(dtype="float16") == ("float16", "bfloat16")
    assert info(dtype="float32", ours="bfloat16") == ("bfloat16", "bfloat16")
    assert info(ours="float16", kv_dtype="float32") == ("float16", "float32")
    with pytest.raises(ModelError, match="torch_dtype is 'int8'"):
        info(torch_dtype="int8")
    with pytest.raises(ModelError, match=r"torch_dtype is \['float32'\]"):
        info(torch_dtype=["float32"])
    with pytest.raises(InvalidRequest, match="dtype is 'fp8'"):
        info(ours="fp8")
    assert info(ours="float16", kv_dtype="float16") == ("float16", "float16")
    assert info(kv_dtype="float16") == ("bfloat16", "float16")
    expected = "kv_dtype is 'fp8', expected one of auto, bfloat16, float16, float32"
    with pytest.raises(InvalidRequest, match=expected):
        info(kv_dtype="fp8")


def test_generation_config_gives_end_tokens_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": [2, 5]}))
    assert describe(tmp_path).eos_token_ids == (2, 5)
    generation = {"eos_token_id": [7, 8, 7, 10**6], "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    info = describe(tmp_path)
    assert info.eos_token_ids == (7, 8, 2, 5)  # one is no id of the vocabulary
    assert info.generation_defaults == generation
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        describe(tmp_path)


def test_sizes_count_weights_and_kv() -> None:
    info = describe(asset("configs/hf/qwen2.5_0.5b.json"))
    assert info.parameters == 494_032_768  # as its model card counts: 0.49 B
    assert info.kv_bytes_per_token == 12 * 1024
    assert describe(asset("configs/hf/llama3_2_1b.json")).kv_bytes_per_token == 32 * 1024
    assert describe(asset("configs/hf/llama3_1_8b_instruct.json")).kv_bytes_per_token == 128 * 1024


# Beginnings of fingerprints, as they were when these families were all there were.
FINGERPRINTS = {
    "internlm2_7b": "384da69fb29ab229",
    "llama3_1_8b_instruct": "ff141a602ff2640e",
    "mistral_7b_instruct": "fec70cb9d612e548",
    "qwen2.5_0.5b": "1520e89a9c68e969",
    "qwen3_4b": "80667e859c447697",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprints_of_the_first_families_stay(name: str) -> None:
    """A changed fingerprint makes every page of KV that users have stored useless."""
    info = describe(asset(f"configs/hf/{name}.json"))
    assert fingerprint(info, "w").startswith(FINGERPRINTS[name])


def test_the_fingerprint_changes_with_all_that_kv_depends_on(tmp_path: Path) -> None:
    def of(weights: str = "w", rope_length: int | None = None, **changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
        return fingerprint(describe(tmp_path, rope_length=rope_length), weights)

    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    prints = [
        of(),
        of("v"),
        of(rms_norm_eps=1e-6),
        of(rope_theta=2e4),
        of(torch_dtype="bfloat16"),
        of(rope_length=300, **dynamic),
        of(rope_length=301, **dynamic),
    ]
    assert len(set(prints)) == len(prints)
    assert of() == of(use_cache=False, eos_token_id=3)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{'a': 1}", "[" * 100_000])
def test_files_that_are_no_config_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        describe(tmp_path)


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        describe(tmp_path)
    for name in (str(tmp_path / "nothing"), "./nothing", "../x", "a/b/c"):
        with pytest.raises((NotFound, ModelError)):
            describe(name)
