"""Quantized checkpoints as tools write them: fields, files of their own, tensors left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import packed_files
import pytest
from assets import asset
from checkpoints import make_model, prompt, reference_logits
from divergences import divergence, round_inputs
from packed_files import quantization

import turbomind
from turbomind import ModelError, describe
from turbomind.quant.schemes import scheme_of

Open = Callable[..., turbomind.Engine]
CPU_ONLY = pytest.mark.cpu_only("a GPU refuses quantized weights")

META = {
    "quantizer": ["gptqmodel:7.3.4"], "uri": "https://github.com/modelcloud/gptqmodel",
    "damp_percent": 0.05, "damp_auto_increment": 0.01, "static_groups": False, "mse": 0.0,
    "true_sequential": True, "gptaq": None, "act_group_aware": True, "mock_quantization": False,
    "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": None}, "pack_impl": "cpu",
    "offload_to_disk": True, "hessian": {"chunk_size": None, "staging_dtype": "float32"},
}  # fmt: skip
GPTQMODEL = {
    "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "method": "gptq",
    "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32",
    "meta": META, "sym": True,
}  # fmt: skip
GPTQMODEL_AWQ = {
    "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "method": "awq",
    "quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32",
    "meta": META, "zero_point": True, "version": "gemm",
}  # fmt: skip
AUTO_ROUND = {
    "bits": 4, "data_type": "int", "group_size": 32, "sym": True, "iters": 0, "batch_size": 4,
    "autoround_version": "0.13.0", "enable_quanted_input": False, "low_gpu_mem_usage": True,
    "block_name_to_quantize": "model.layers", "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
AUTO_GPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "static_groups": False,
    "sym": True, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "m",
}  # fmt: skip
AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
NO_IDX = {"g_idx": None}
# What is packed, and the config. A tensor with None is left out; with a number it has that alone.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPTQModel": ({}, GPTQMODEL),
    "GPTQModel, method alone": ({}, {**GPTQMODEL, "quant_method": None}),
    "GPTQModel, gptq_v2": (
        {"sym": False, "stored": 0},
        {**GPTQMODEL, "sym": False, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    ),
    "GPTQModel, rules": (
        {},
        {**GPTQMODEL, "dynamic": {r"-:.*\.experts\..*": {}, "+:.*q_proj": {"bits": 4, "mse": 2.0}}},
    ),
    "GPTQModel, AWQ": ({"awq": True}, GPTQMODEL_AWQ),
    "AutoRound": (
        NO_IDX, {**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 16}, "x": {"sym": True}}}
    ),
    "AutoRound, old": (
        {}, {**AUTO_ROUND, "quant_method": "intel/auto-round", "packing_format": None,
             "backend": "auto_round:gptq:exllamav2", "scale_dtype": "torch.float16"},
    ),
    "AutoRound, zeros": (
        {**NO_IDX, "sym": False, "stored": 0},
        {**AUTO_ROUND, "sym": False, "packing_format": "auto_round"},
    ),
    "AutoRound, zeros of GPTQ": ({**NO_IDX, "sym": False}, {**AUTO_ROUND, "sym": False}),
    "AutoRound, GPTQModel's": (
        {"sym": False, "stored": 0},
        {**AUTO_ROUND, "sym": False, "packing_format": "auto_round:gptqmodel"},
    ),
    "AutoRound, AWQ": (
        {"awq": True}, {**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}
    ),
    "AutoRound as GPTQ": (
        NO_IDX, {**AUTO_ROUND, "quant_method": "gptq", "packing_format": None, "desc_act": False,
                 "provider": "auto-round", "true_sequential": False, "damp_percent": 0.01},
    ),
    "AutoRound as AWQ": (
        {"awq": True, "sym": True},
        {**AUTO_ROUND, "quant_method": "awq", "packing_format": None, "zero_point": False,
         "version": "gemm", "provider": "auto-round", "modules_to_not_convert": ["lm_head"]},
    ),
    "AWQ without zeros": (
        {"awq": True, "sym": True, "qzeros": None}, {**GPTQMODEL_AWQ, "zero_point": False}
    ),
    "no g_idx": (NO_IDX, GPTQMODEL),
    "no g_idx, whole rows": ({**NO_IDX, "group": -1}, {**GPTQMODEL, "group_size": -1}),
    "no g_idx, zeros": ({**NO_IDX, "sym": False}, {**GPTQMODEL, "sym": False}),
    "g_idx of -1": ({"g_idx": -1}, GPTQMODEL),
    "g_idx of -1, desc_act": ({"g_idx": -1}, {**GPTQMODEL, "desc_act": True}),
    "AutoGPTQ": ({}, {"quantize_config.json": AUTO_GPTQ}),
    "AutoAWQ": ({"awq": True}, {"quant_config.json": AUTO_AWQ}),
    "AutoRound, a file": (NO_IDX, {"quantization_config.json": AUTO_ROUND}),
}  # fmt: skip


def checkpoint(folder: Path, packing: dict[str, Any], config: dict[str, Any]) -> Any:
    """Writes a checkpoint and returns transformers' model with its values."""
    arguments = {"sym": True, **packing}
    is_awq, group = arguments.pop("awq", False), arguments.pop("group", 32)
    changes = {name: arguments.pop(name) for name in ("g_idx", "qzeros") if name in arguments}
    dice = np.random.default_rng(7)

    def parts(_: str, weight: np.ndarray) -> Any:
        if is_awq:
            tensors, values = packed_files.awq(dice, weight, group, packing.get("sym", False))
        else:
            tensors, values = packed_files.gptq(dice, weight, bits=4, group=group, **arguments)
        for name, value in changes.items():
            tensor = tensors.pop(name)
            if value is not None:
                tensors[name] = np.full_like(tensor, value)
        return tensors, values

    sizes = {"intermediate_size": 224, "hidden_size": 128, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "tie_word_embeddings": True})
    packed_files.write(model, folder, config, parts)
    file = next(iter(config))
    if file.endswith(".json"):
        values = json.loads((folder / "config.json").read_text())
        (folder / file).write_text(json.dumps(values.pop("quantization_config")[file]))
        (folder / "config.json").write_text(json.dumps(values))
    return model


@CPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_checkpoints_of_tools_have_the_logits_of_their_codes(
    name: str, open_engine: Open, tmp_path: Path
) -> None:
    packing, config = CASES[name]
    model = checkpoint(tmp_path, packing, config)
    engine = open_engine(tmp_path, dtype="float32")
    assert engine.info.weights_text.startswith("int4-g")
    ids = prompt(60, engine.vocab_size)
    group = 128 if packing.get("group") == -1 else 32
    theirs = reference_logits(round_inputs(model, group), ids)
    assert divergence(theirs, engine.logits(ids)) <= 1e-3


def test_an_order_of_columns_needs_its_tensor(tmp_path: Path) -> None:
    checkpoint(tmp_path, NO_IDX, {**GPTQMODEL, "desc_act": True})
    with pytest.raises(ModelError, match="q_proj.g_idx is missing"):
        turbomind.Engine(tmp_path, device="cpu", threads=1)


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            "hf_quant_config.json has quantized weights .NVFP4 of modelopt., expected awq",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            "hf_quant_config.json has quantized weights .FP8 of modelopt.",
        ),
        ("quantize_config.json", {**AUTO_GPTQ, "bits": 3}, "quantize_config.json: bits is 3, expe"),
        ("quantize_config.json", {**AUTO_GPTQ, "quant_method": "exl3"}, "quantized weights .exl3."),
        (
            "quant_config.json",
            {**AUTO_AWQ, "version": "GEMV"},
            "quant_config.json: version is 'GEM",
        ),
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "quantization has .*MLX"),
        ("config.json", {"quantization_config": {"group_size": 64, "bits": 4}}, "weights .MLX."),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
)
def test_other_descriptions_are_refused_by_name(
    file: str, values: dict[str, Any], match: str, tmp_path: Path
) -> None:
    make_model("Qwen2", {}).save_pretrained(tmp_path)
    path = tmp_path / file
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | values))
    with pytest.raises(ModelError, match=match):
        describe(tmp_path)


def test_descriptions_of_nothing_are_none(tmp_path: Path) -> None:
    make_model("Qwen2", {}).save_pretrained(tmp_path)
    kv_alone = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(kv_alone))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization": {}}))
    assert describe(tmp_path).quantization is None


@pytest.mark.parametrize("end", ["qweight", "weight_packed", "scales", "weight_scale_inv"])
def test_quantized_weights_that_nothing_describes_are_refused_as_such(
    end: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    make_model("Qwen2", {}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight = "model.layers.0.self_attn.q_proj.weight"
    tensors[f"{weight.removesuffix('weight')}{end}"] = tensors.pop(weight)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="belongs to quantized weights, expected a description"):
        turbomind.Engine(tmp_path, device="cpu", threads=1)


def test_real_descriptions_are_read_or_refused_by_their_method() -> None:
    known = json.loads(asset("configs/quantization_configs.json").read_text())
    read = {"awq", "gptq", "compressed_tensors_w8a8_int8", "mxfp4"}
    for name, each in known.items():
        config = each.get("quantization_config")
        if name in read:
            scheme_of(quantization(config), None)
        elif config is not None:
            reason = config.get("format") or config["quant_method"]
            with pytest.raises(ModelError, match=reason):
                scheme_of(quantization(config), None)
