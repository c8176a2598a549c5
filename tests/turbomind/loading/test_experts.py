"""Configs and checkpoints of models with experts, and what is wrong with damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from assets import ROOT
from checkpoints import TINY, tiny_tensors, write_tiny
from safetensors.numpy import save_file

from turbomind import Engine, ModelError, describe
from turbomind.models import Description, Experts, family_of
from turbomind.quant.mxfp4 import widened

QWEN3_MOE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MIXTRAL = TINY | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2_MOE = QWEN3_MOE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
}
OLMOE = TINY | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "clip_qkv": None,
    "norm_topk_prob": False,
}
# Granite-3.1-1B-A400M, as its card counts.
GRANITE_MOE = json.loads((ROOT / "tests/data/configs/granite-3.1-1b-a400m.json").read_text())
GPT_OSS = TINY | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "cache_memory": "2MiB"}


def read(values: dict[str, Any]) -> Description:
    return family_of(values).describe(values)


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns what the family asks for, in values that no other tensor has."""
    dice = np.random.default_rng(1)
    shapes = {r.tensor: r.shape for _, rows in family_of(config).slots(read(config)) for r in rows}
    return {
        name: dice.uniform(-0.3, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }


def test_layers_with_and_without_experts() -> None:
    def kinds(**changes: Any) -> list[bool]:
        layers = read(QWEN3_MOE | {"num_hidden_layers": 6} | changes).layers
        assert all((layer.intermediate == 0) == (layer.experts is not None) for layer in layers)
        return [layer.experts is not None for layer in layers]

    assert kinds() == [True] * 6
    assert kinds(mlp_only_layers=None) == [True] * 6
    assert kinds(mlp_only_layers=[0, 3]) == [False, True, True, False, True, True]
    assert kinds(decoder_sparse_step=3) == [False, False, True, False, False, True]
    assert kinds(decoder_sparse_step=2, mlp_only_layers=[1]) == [False] * 3 + [True, False, True]


def test_fields_of_experts() -> None:
    assert read(QWEN3_MOE).layers[0].experts == Experts(4, 2, 24, True)
    assert read(QWEN3_MOE | {"norm_topk_prob": None}).layers[0].experts == Experts(4, 2, 24, False)
    # The reference writes its own name of the number.
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 5}
    assert read(renamed).layers[0].experts == Experts(5, 2, 24, True)
    assert read(MIXTRAL).layers[0].experts == Experts(4, 2, 48, True)
    assert read(MIXTRAL | {"sliding_window": 40}).layers[0].window == 40
    windows = QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 30}
    assert [layer.window for layer in read(windows | {"num_hidden_layers": 3}).layers] == [30] * 3


def test_a_shared_expert_is_an_mlp_beside_the_others() -> None:
    layers = read(QWEN2_MOE | {"num_hidden_layers": 2, "mlp_only_layers": [0]}).layers
    assert [(layer.intermediate, layer.mlp_gate) for layer in layers] == [(48, False), (40, True)]
    assert layers[1].experts == Experts(4, 2, 24, True)
    names = [r.tensor for _, rows in family_of(QWEN2_MOE).slots(read(QWEN2_MOE)) for r in rows]
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in names
    assert "model.layers.0.mlp.shared_expert_gate.weight" in names
    windows = QWEN2_MOE | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert [w.window for w in read(windows | {"num_hidden_layers": 5}).layers] == [9, 0, 9, 0, 0]


def test_granite_and_gpt_oss_have_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_MOE))
    info = describe(tmp_path)
    assert info.parameters == 1_334_628_352
    assert info.description.layers[0].experts == Experts(32, 8, 512, True)
    layers = read(GPT_OSS | {"num_hidden_layers": 4}).layers
    assert [layer.window for layer in layers] == [128, 0, 128, 0]
    assert {(layer.activation, layer.sinks, layer.o_bias) for layer in layers} == {
        ("swiglu", True, True)
    }
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
    absent = read({name: value for name, value in GPT_OSS.items() if name != "rope_theta"})
    assert absent.rope == read(GPT_OSS | {"rope_theta": 150000.0, "rope_scaling": yarn}).rope


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most the n"),
        (QWEN3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        (QWEN3_MOE, {"num_experts": 1025}, "num_experts is 1025, expected an integer from 1 to 10"),
        (QWEN3_MOE, {"num_experts": None, "num_local_experts": 0}, "num_local_experts is 0"),
        (QWEN3_MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of layers"),
        (QWEN3_MOE, {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
        (QWEN3_MOE, {"num_local_experts": 9}, "num_experts is 4, expected num_local_experts, 9"),
        (MIXTRAL, {"num_local_experts": 1}, "num_experts_per_tok is 2, expected at most the numbe"),
        (MIXTRAL, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (GRANITE_MOE, {"num_experts_per_tok": 33}, "num_experts_per_tok is 33"),
        (GPT_OSS, {"swiglu_limit": 6.0}, "swiglu_limit is 6.0, expected 7.0"),
        (GPT_OSS, {"layer_types": ["full_attention"] * 2}, "layer_types is .*expected 1 times"),
    ],
)
def test_wrong_fields_of_experts_are_refused(
    config: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ModelError, match=match):
        read(config | changes)


SINGLE = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "olmoe": OLMOE}


@pytest.mark.parametrize("config", SINGLE.values(), ids=SINGLE)
def test_damaged_tensors_of_experts_are_named(config: dict[str, Any], tmp_path: Path) -> None:
    whole = tensors(config)
    name = next(n for n in whole if ".experts.2." in n)

    def error(changed: dict[str, np.ndarray]) -> str:
        folder = write_tiny(tmp_path / "damaged", config, changed)
        with pytest.raises(ModelError) as error:
            Engine(folder, **OPTIONS)
        return str(error.value)

    Engine(write_tiny(tmp_path / "whole", config, whole), **OPTIONS).close()
    assert f"tensor {name} is missing" in error({n: t for n, t in whole.items() if n != name})
    assert f"tensor {name} has shape" in error(whole | {name: whole[name][:-1]})
    broken = whole[name].copy()
    broken[1, 2] = np.nan
    assert "experts.2.gate_up has a NaN" in error(whole | {name: broken})
    more = name.replace("experts.2", "experts.4")
    assert f"no use for: {more}" in error(whole | {more: whole[name]})
    router = next(n for n in whole if n.endswith(".gate.weight"))
    assert f"tensor {router} has shape" in error(whole | {router: whole[router][:-1]})


GEMMA4 = TINY | {
    "rope_theta": None,
    "hidden_act": None,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "global_head_dim": 24,
    "head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "top_k_experts": 2,
}
STACKED = {
    "granite_moe": TINY | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": GPT_OSS,
    "gemma4": GEMMA4,
}  # fmt: skip


@pytest.mark.parametrize("config", STACKED.values(), ids=STACKED)
def test_damaged_stacks_of_experts_are_named(config: dict[str, Any], tmp_path: Path) -> None:
    whole = tensors(config)
    for name in [n for n in whole if "input_linear" in n or ".experts" in n]:

        def error(changed: dict[str, np.ndarray]) -> str:
            folder = write_tiny(tmp_path / "damaged", config, changed)
            with pytest.raises(ModelError) as error:
                Engine(folder, **OPTIONS)
            return str(error.value)

        assert f"tensor {name} is missing" in error({n: t for n, t in whole.items() if n != name})
        assert f"tensor {name} has shape" in error(whole | {name: whole[name][:-1]})
        broken = whole[name].copy()
        broken[2, ..., 3] = np.nan
        assert "layers.0.experts.2." in error(whole | {name: broken})


def random_blocks(config: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns tensors with MXFP4 experts, and with the experts that the reference makes of them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dice = np.random.default_rng(3)
    packed, dense = tensors(config), tensors(config)
    for name in [n for n in packed if n.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = packed.pop(name).shape
        shape = (count, outputs, inputs // 32)
        blocks = dice.integers(0, 256, (*shape, 16), dtype=np.uint8)
        scales = dice.integers(118, 124, shape, dtype=np.uint8)
        blocks[0, 0], scales[0, 0] = 0, 0  # zeros have any exponent
        scales[1, 3], scales[2, 1] = 1, 3
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        dense[name] = values.float().numpy()
    return packed, dense


def write_mixed(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "model.safetensors"
    )
    return folder


MXFP4 = GPT_OSS | {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
}


def test_mxfp4_experts_are_widened_as_in_transformers(tmp_path: Path) -> None:
    packed, dense = random_blocks(GPT_OSS)
    plain = write_mixed(tmp_path / "dense", GPT_OSS, dense)
    folder = write_mixed(tmp_path / "packed", MXFP4, packed)
    for dtype in ("bfloat16", "float32"):
        options = OPTIONS | {"dtype": dtype}
        with Engine(plain, **options) as one, Engine(folder, **options) as other:
            expected = one.logits([3, 4, 5, 6, 7])
            assert np.array_equal(other.logits([3, 4, 5, 6, 7]), expected)
    with Engine(write_mixed(tmp_path / "mixed", MXFP4, dense), **OPTIONS) as engine:
        engine.logits([3])  # a finetuned model may have dense experts under the old config


def test_every_code_and_exponent_of_mxfp4_is_exact() -> None:
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (256, 1, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    bits = widened(blocks, scales).astype(np.uint32) << 16
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([blocks & 15, blocks >> 4], axis=3).reshape(256, 512)
    sign = np.where(codes & 8, -1.0, 1.0)
    expected = sign * table[codes & 7] * np.exp2(np.arange(256.0) - 127)[:, None]
    seen = bits.view(np.float32).astype(np.float64)
    fits = np.abs(expected) < 2.0**128
    fits[255] = False
    assert np.array_equal(seen[fits], expected[fits])
    assert np.array_equal(np.signbit(seen[fits]), np.signbit(expected[fits]))
    assert not np.isfinite(seen[~fits]).any()


def test_damaged_mxfp4_experts_are_named(tmp_path: Path) -> None:
    packed, _ = random_blocks(GPT_OSS)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def error(changed: dict[str, np.ndarray], config: dict[str, Any] = MXFP4) -> str:
        with pytest.raises(ModelError) as error:
            Engine(write_mixed(tmp_path / "damaged", config, changed), **OPTIONS)
        return str(error.value)

    def without(end: str) -> dict[str, np.ndarray]:
        return {n: t for n, t in packed.items() if n != name + end}

    assert f"tensor {name}_scales is missing" in error(without("_scales"))
    assert f"tensor {name} is missing" in error(without("_blocks"))
    short = packed | {f"{name}_scales": packed[f"{name}_scales"][:, 1:]}
    assert f"tensor {name}_scales has shape" in error(short)
    wide = packed | {f"{name}_blocks": packed[f"{name}_blocks"].astype(np.int32)}
    assert f"tensor {name}_blocks has dtype I32" in error(wide)
    scales = packed[f"{name}_scales"].copy()
    scales[3, 5] = 255
    assert "layers.0.experts.3.gate_up has a NaN" in error(packed | {f"{name}_scales": scales})
    assert f"tensor {name} is missing" in error(packed, GPT_OSS)  # nothing names the scheme
    odd = MXFP4["quantization_config"] | {"bits": 3}  # type: ignore[operator]
    assert "bits" in error(packed, MXFP4 | {"quantization_config": odd})


def test_both_ways_to_stack_the_experts_of_qwen3_vl_are_read(tmp_path: Path) -> None:
    """Hubs have them transposed, transformers saves them as it computes with them."""
    config = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {k: v for k, v in QWEN3_MOE.items() if k != "architectures"}
        | {"model_type": "qwen3_vl_moe_text", "tie_word_embeddings": True},
        "vision_config": {"model_type": "qwen3_vl_moe_vision"},
        "tie_word_embeddings": False,
    }
    stored = tensors(config)
    assert "lm_head.weight" in stored  # the outer field decides
    turned = {n: t.swapaxes(1, 2) if "experts" in n else t for n, t in stored.items()}
    assert turned["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 24)
    logits = []
    for name, each in (("hub", stored), ("saved", turned)):
        with Engine(write_mixed(tmp_path / name, config, each), **OPTIONS) as engine:
            logits.append(engine.logits([3, 4, 5]))
    assert np.array_equal(*logits)


def test_experts_that_no_weights_fill_are_not_those_of_an_mlp(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, QWEN3_MOE, tiny_tensors())
    with pytest.raises(ModelError, match="is missing"):
        Engine(folder, **OPTIONS)


def test_sizes_count_the_experts_that_steps_read(tmp_path: Path) -> None:
    info = describe(write_tiny(tmp_path, QWEN3_MOE, tensors(QWEN3_MOE)))
    experts = sum(slot.bytes for slot in info.slots if ".experts." in slot.name)
    others = info.step_weight_bytes() - experts // 2  # 2 of 4
    assert info.step_weight_bytes(2) == others + experts * 3 // 4
    assert info.step_weight_bytes(10_000) == others + experts
    assert info.parameters == sum(t.size for t in tensors(QWEN3_MOE).values())


def test_quantized_experts_keep_their_router(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, QWEN3_MOE, tensors(QWEN3_MOE))
    info = describe(folder, quantize=_int8())
    formats = {slot.name: slot.format for slot in info.slots if slot.linear}
    assert formats["layers.0.router"] == "float32"
    assert {formats[f"layers.0.experts.{j}.down"] for j in range(4)} == {"int8"}
    with Engine(folder, **OPTIONS) as plain, Engine(folder, quantize="int8", **OPTIONS) as small:
        exact = plain.logits([3, 4, 5, 6])
        assert 0 < np.abs(small.logits([3, 4, 5, 6]) - exact).max() < 0.1 * np.abs(exact).max()


def _int8() -> Any:
    from turbomind.loading.quantize import Quantize

    return Quantize("int8")
