"""GGUF files of models with experts and of Gemma 4: how tensors are stored, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import MODELS, SMALL, Zoo, make_model, prompt, relative

import turbomind
from turbomind import ModelError
from turbomind.gguf.file import GgufFile
from turbomind.loading.loader import describe

Open = Callable[..., turbomind.Engine]


@pytest.mark.parametrize(
    ("name", "experts"),
    [("mixtral", "single"), ("mixtral", "fused"), ("qwen2_moe_file", "fused"),
     ("gpt_oss", "fused"), ("granite_moe", "fused"), ("gemma4_moe", "apart")],
)  # fmt: skip
def test_experts_are_the_same_however_a_file_stores_them(
    name: str, experts: str, zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    folder = zoo.folder(name)
    config = json.loads((folder / "config.json").read_text())
    more = {}
    if name.startswith("gemma4"):
        more = {"rope_freqs.weight": gguf_files.proportional_divisors(config)}
    usual = gguf_files.write_gguf(folder, tmp_path / "usual.gguf", more=more)
    other = gguf_files.write_gguf(folder, tmp_path / "other.gguf", more=more, experts=experts)
    assert GgufFile(usual).tensors.keys() != GgufFile(other).tensors.keys()
    ids = prompt(60, config["vocab_size"])
    assert (open_engine(usual).logits(ids) == open_engine(other).logits(ids)).all()


@pytest.mark.parametrize("experts", ["apart", "fused"])
def test_mxfp4_experts_have_the_values_of_the_library(
    experts: str, open_engine: Open, tmp_path: Path
) -> None:
    """Files of gpt-oss have them. Both kinds are made of the same values, so the bits are equal."""
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    make_model(*GPT_OSS).save_pretrained(tmp_path / "hf")

    def write(path: Path, widen: bool) -> Path:
        def kind(name: str) -> gguf.GGMLQuantizationType:
            return mxfp4 if "_exps.weight" in name and not widen else gguf_files.F32

        def value(name: str, values: np.ndarray) -> np.ndarray:
            if not widen or "_exps.weight" not in name:
                return values
            return gguf.dequantize(gguf.quantize(values, mxfp4), mxfp4)

        return gguf_files.write_gguf(tmp_path / "hf", path, kind, experts=experts, rounded=value)

    packed = open_engine(write(tmp_path / "packed.gguf", False), dtype="float32")
    wide = open_engine(write(tmp_path / "wide.gguf", True), dtype="float32")
    ids = prompt(60, packed.vocab_size)
    assert (packed.logits(ids) == wide.logits(ids)).all()
    assert describe(tmp_path / "packed.gguf").dtype == "bfloat16"  # of most of its weights


GPT_OSS: tuple[str, dict[str, Any]] = (
    "GptOss",
    {"head_dim": 24, "intermediate_size": 32, "num_local_experts": 5, "num_experts_per_tok": 2,
     "sliding_window": 30, "vocab_size": 131},
)  # fmt: skip


@pytest.mark.cpu_only("a GPU refuses quantized weights")
@pytest.mark.parametrize("name", ["qwen2_moe_file", "gpt_oss", "gemma4_shared", "gemma4_moe"])
def test_every_matrix_of_these_families_may_be_quantized(
    name: str, zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    """The logits are about those of the same values in float32; inputs are rounded to int8."""
    changes = {
        "shared_expert_intermediate_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "moe_intermediate_size": 32,
    }
    family, fields = MODELS[name]
    changes = {key: value for key, value in changes.items() if key in {**SMALL, **fields}}
    if name.startswith("gemma4"):
        changes |= {"global_head_dim": 64, "vocab_size_per_layer_input": SMALL["vocab_size"]}
    make_model(family, {**fields, **changes}).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    more = {}
    if name.startswith("gemma4"):
        more = {"rope_freqs.weight": gguf_files.proportional_divisors(config)}
    q8 = gguf.GGMLQuantizationType.Q8_0

    def kind(name: str) -> gguf.GGMLQuantizationType:
        return gguf_files.F32 if "ffn_gate_inp" in name or name.endswith("bias") else q8

    def value(name: str, values: np.ndarray) -> np.ndarray:
        if values.ndim == 1 or kind(name) != q8:
            return values
        return gguf.dequantize(gguf.quantize(values, q8), q8)

    codes = gguf_files.write_gguf(tmp_path / "hf", tmp_path / "codes.gguf", kind, more=more)
    plain = gguf_files.write_gguf(
        tmp_path / "hf", tmp_path / "plain.gguf", more=more, rounded=value
    )
    engine = open_engine(codes, dtype="float32")
    dense = {"router", "mlp_gate"}
    for slot in engine.info.slots:
        if slot.linear and slot.name.split(".")[-1] not in dense:
            assert slot.format == "int8-g32-float16", slot.name
    ids = prompt(60, engine.vocab_size)
    ours, exact = engine.logits(ids), open_engine(plain).logits(ids)
    errors = [relative(a, b) for a, b in zip(ours, exact, strict=True)]
    assert 0 < np.median(errors) < 0.25  # one wrong matrix makes it more than 1


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("gemma4_moe", {"attention.sliding_window_pattern": None}, "pattern is absent, expected 3"),
        ("gemma4_moe", {"attention.sliding_window_pattern": [1, 2, 0]}, "pattern is .* 3 bools"),
        ("gemma4_moe", {"attention.sliding_window_pattern": [True, False]}, "expected 3 bools"),
        ("gemma4_moe", {"attention.head_count_kv": [2, 1]}, "a number or 3 of them"),
        ("gemma4_moe", {"feed_forward_length": [112, 112, 224]}, "expected one width, or twice it"),
        ("gemma4_moe", {"rope.dimension_count": 24}, "dimension_count is 24, expected the width"),
        ("gemma4_moe", {"attention.key_length_swa": 26}, "_swa is 24, expected the width of a hea"),
        ("gemma4_moe", {"attention.key_length": "x"}, "key_length is 'x', expected a number"),
        ("gemma4_moe", {"block_count": 0}, "expected a number, and one of 0 layers"),
        ("gemma4_moe", {"expert_used_count": None}, "expert_used_count is absent, expected a num"),
        ("gemma4_moe", {"expert_used_count": 8}, "expert_used_count is 8, expected at most the n"),
        ("gemma4_moe", {"attention.shared_kv_layers": 3}, "attention.shared_kv_layers is 3"),
        ("gemma4", {"rope.scaling.type": "yarn"}, "rope_scaling is"),
    ],
)
def test_wrong_metadata_of_gemma4_are_refused_by_name(
    name: str, changes: dict[str, Any], match: str, zoo: Zoo, tmp_path: Path
) -> None:
    folder = zoo.folder(name)
    config = json.loads((folder / "config.json").read_text())
    more = {"rope_freqs.weight": gguf_files.proportional_divisors(config)}
    changes = {f"gemma4.{key}": value for key, value in changes.items()}
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", more=more, changes=changes)
    with pytest.raises(ModelError, match=match):
        describe(path)


def test_divisors_of_gemma4_are_checked(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="rope_freqs.weight is missing"):
        describe(gguf_files.write_gguf(zoo.folder("gemma4"), path))
    for values in ([1.0] * 5 + [2.0] * 15, [1.0] * 5 + [1e30] * 14 + [1.0]):
        more = {"rope_freqs.weight": np.array(values, np.float32)}
        with pytest.raises(ModelError, match="expected a proportional rotation"):
            describe(gguf_files.write_gguf(zoo.folder("gemma4"), path, more=more))


def test_unused_projections_of_gemma4_are_ignored(
    zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    folder = zoo.folder("gemma4_shared")
    config = json.loads((folder / "config.json").read_text())
    more = {
        "rope_freqs.weight": gguf_files.proportional_divisors(config),
        "blk.4.attn_k.weight": np.ones((80, 64), np.float32),
        "blk.4.attn_k_norm.weight": np.ones(40, np.float32),
    }
    open_engine(gguf_files.write_gguf(folder, tmp_path / "model.gguf", more=more)).logits([3])
    more["blk.1.attn_k_norm.bias"] = np.ones(40, np.float32)
    with pytest.raises(ModelError, match="no use for: blk.1.attn_k_norm.bias; expected none"):
        open_engine(gguf_files.write_gguf(folder, tmp_path / "model.gguf", more=more))


def test_early_files_of_qwen2moe_have_no_widths_of_experts(zoo: Zoo, tmp_path: Path) -> None:
    folder = zoo.folder("qwen2_moe_file")
    changes: dict[str, Any] = {
        "qwen2moe.expert_feed_forward_length": None,
        "qwen2moe.expert_shared_feed_forward_length": None,
    }
    layer = describe(
        gguf_files.write_gguf(folder, tmp_path / "model.gguf", changes=changes), weights=False
    ).description.layers[0]
    assert layer.experts is not None
    assert (layer.experts.intermediate, layer.intermediate) == (112 // 3, 112)
