"""AWQ and GPTQ checkpoints: values by a few lines of numpy, logits, and files that are refused."""

from __future__ import annotations

import functools
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
from packed_files import Tensors, change, drop, one_nan, quantization

import turbomind
from turbomind import _C, InvalidRequest, ModelError
from turbomind.files.checkpoint import Checkpoint
from turbomind.loading.loader import describe
from turbomind.models import Rows
from turbomind.quant.gptq import Gptq
from turbomind.quant.schemes import scheme_of

Open = Callable[..., turbomind.Engine]
CPU_ONLY = pytest.mark.cpu_only("a GPU refuses quantized weights")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
V2 = {"checkpoint_format": "gptq_v2", "stored": 0}
DICE = ("stored", "lowest")  # arguments of `packed_files.gptq` among the fields of a case
CASES: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq, short last group": {**AWQ, "group_size": 64, "version": "GEMM"},
    "gptq": GPTQ,
    "gptq, new tool": {**GPTQ, "stored": 0},
    "gptq, 8 bits": {**GPTQ, "bits": 8, "group_size": 64},
    "gptq, whole rows": {**GPTQ, "group_size": -1},
    "gptq, zeros": {**GPTQ, "sym": False},
    "gptq, zeros from 0": {**GPTQ, "sym": False, "lowest": 0},
    "gptq, 8 bits, zeros from 0": {**GPTQ, "bits": 8, "sym": False, "lowest": 0},
    "gptq_v2, zeros": {**GPTQ, "sym": False, **V2},
    "gptq_v2, zeros from 0": {**GPTQ, "sym": False, **V2, "lowest": 0},
    "gptq, desc_act": {**GPTQ, "sym": False, "desc_act": True},
}


def parts(case: dict[str, Any]) -> Callable[[str, np.ndarray], Any]:
    """Returns what makes the tensors of a module."""
    rng = np.random.default_rng(7)
    if case["quant_method"] == "awq":
        return lambda _, weight: packed_files.awq(rng, weight, case["group_size"])
    make = functools.partial(
        packed_files.gptq, rng, bits=case["bits"], group=case["group_size"],
        sym=case["sym"], **{name: case[name] for name in DICE if name in case},
    )  # fmt: skip

    def one(name: str, weight: np.ndarray) -> Any:
        # Each of q, k and v has an order of its own; gate and up share theirs.
        shared = name.replace("up_proj", "gate_proj").encode()
        dice = np.random.default_rng(list(shared))
        order = dice.permutation(weight.shape[1]) if case["desc_act"] else None
        return make(weight, order=order)

    return one


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """Returns the field quantization_config of a case."""
    return {name: value for name, value in case.items() if name not in DICE}


def checkpoint(
    folder: Path, case: dict[str, Any], more: Callable[[Tensors], None] = lambda tensors: None
) -> Any:
    """Writes a checkpoint and returns transformers' model with its values."""
    config = config_of(case)
    sizes = {"intermediate_size": 224, "hidden_size": 128, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "tie_word_embeddings": True})
    packed_files.write(model, folder, config, parts(case), more)
    return model


@CPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_values_and_logits_are_those_of_the_codes(
    name: str, open_engine: Open, tmp_path: Path
) -> None:
    case = CASES[name]
    model = checkpoint(tmp_path, case)
    scheme = scheme_of(quantization(config_of(case)), Checkpoint(tmp_path))
    for module in ("self_attn.k_proj", "mlp.down_proj"):
        weight = f"model.layers.1.{module}.weight"
        values = model.state_dict()[weight].numpy()
        row = Rows(weight, values.shape, 3, len(values) - 3)
        kind = scheme.kind(row)
        assert kind is not None
        unpacked = _C.test_unpack_codes(kind.format(), scheme.codes(row), 3)
        assert np.array_equal(unpacked, values[3:])
    engine = open_engine(tmp_path, dtype="float32")
    assert engine.info.weights_text.startswith(f"int{case['bits']}-g")
    ids = prompt(60, engine.vocab_size)
    group = 128 if case["group_size"] == -1 else case["group_size"]
    orders = packed_files.column_orders(tmp_path)
    theirs = reference_logits(round_inputs(model, group, orders), ids)
    assert divergence(theirs, engine.logits(ids)) <= 1e-3


@CPU_ONLY
@pytest.mark.parametrize(
    ("name", "correction"),
    [("gptq, zeros", ""), ("gptq, zeros from 0", "zeros"), ("gptq_v2, zeros from 0", "")],
)
def test_kv_of_zeros_that_were_read_wrong_is_not_used(
    name: str, correction: str, open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions read a zero point of 0 as 16, and stored KV of such weights."""
    checkpoint(tmp_path, CASES[name])
    now = open_engine(tmp_path).fingerprint
    monkeypatch.setattr(Gptq, "correction", lambda self, rows: "")
    assert (open_engine(tmp_path).fingerprint == now) == (not correction)


Q = "model.layers.1.self_attn.q_proj"


@CPU_ONLY
@pytest.mark.parametrize(
    ("name", "more", "match"),
    [
        ("awq", drop(f"{Q}.qzeros"), f"tensor {Q}.qzeros is missing"),
        ("awq", change(f"{Q}.scales", lambda s: s[:2]), f"tensor {Q}.scales has shape"),
        ("awq", change(f"{Q}.qweight", lambda w: w.T), f"tensor {Q}.qweight has shape"),
        ("awq", change(f"{Q}.qzeros", lambda z: z.view(np.float32)), "qzeros has dtype F32"),
        ("awq", change(f"{Q}.scales", one_nan), "layers.1.qkv"),
        ("gptq", change(f"{Q}.qzeros", lambda z: z * 0), f"tensor {Q}.qzeros has values from 0"),
        ("gptq", change(f"{Q}.g_idx", lambda g: g[::-1]), f"tensor {Q}.g_idx is not in order"),
        ("gptq, desc_act", change(f"{Q}.g_idx", lambda g: g + 1), r"g_idx has groups 1 to 4, exp"),
        ("gptq, desc_act", change(f"{Q}.g_idx", lambda g: g * 0), r"g_idx has 128 columns of gr"),
        ("gptq", lambda t: t.update({f"{Q[:-6]}o_proj.bias": np.ones(128, np.float32)}), "no use"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused_and_an_engine_beside_runs_on(
    name: str, more: Callable[[Tensors], None], match: str, open_engine: Open, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "good", CASES[name])
    beside = open_engine(tmp_path / "good")
    expected = beside.logits([3, 4, 5])
    checkpoint(tmp_path / "bad", CASES[name], more)
    with pytest.raises(ModelError, match=match):
        open_engine(tmp_path / "bad")
    assert (beside.logits([3, 4, 5]) == expected).all()


@CPU_ONLY
def test_biases_of_zero_are_skipped(open_engine: Open, tmp_path: Path) -> None:
    bias = {"model.layers.0.mlp.down_proj.bias": np.zeros(128, np.float16)}
    checkpoint(tmp_path, GPTQ, lambda tensors: tensors.update(bias))
    open_engine(tmp_path)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**AWQ, "bits": 3}, "quantization_config: bits is 3"),
        ({**AWQ, "version": "gemv"}, "quantization_config: version is 'gemv', expected 'gemm'"),
        ({**AWQ, "group_size": 100}, "quantization_config: group_size is 100, expected -1 or"),
        ({**AWQ, "format": "gemv_fast"}, "format is 'gemv_fast', expected 'gemm'"),
        ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq', expected 'autoawq'"),
        ({**AWQ, "w_bit": 3, "bits": None}, "quantization_config: w_bit is 3"),
        ({**GPTQ, "bits": 6}, "quantization_config: bits is 6, expected 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected"),
        (
            {**GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq"},
            "checkpoint_format is 'gptq',",
        ),
        ({**GPTQ, "format": "gptq_p"}, "format is 'gptq_p', expected 'gptq' or 'gptq_v2'"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard', expected False or None"),
        ({**GPTQ, "adapter": {"name": "lora"}}, "adapter is .*expected None"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16', expected 'int32'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True, expected False"),
        ({**GPTQ, "data_type": "mx_fp"}, "data_type is 'mx_fp', expected 'int'"),
        ({**GPTQ, "act_bits": 8}, "act_bits is 8, expected 16"),
        (
            {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}},
            r"dynamic: \+:.*: bits is 8, expected 4",
        ),
        (
            {**GPTQ, "dynamic": {".*": {"group_size": 64}}},
            "dynamic: .*group_size is 64, expected 32",
        ),
        ({**GPTQ, "dynamic": ["-:x"]}, "dynamic is .*expected an object of objects"),
        ({**AUTO, "extra_config": {"a": {"bits": 8}}}, "extra_config: a.*bits is 8, expected 4"),
        ({**AUTO, "packing_format": "auto_round:llm_compressor"}, "packing_format is .*llm_compre"),
        ({**AUTO, "packing_format": "mlx"}, "packing_format is 'mlx', expected 'auto_round' or"),
        ({**AUTO, "spinquant_config": {"r1": True}}, "spinquant_config is .*expected {} or None"),
        ({"bits": 4, "group_size": 64}, "has quantized weights .MLX., expected awq, gptq, auto-ro"),
        (
            {"quant_method": "fp8"},
            "quantized weights .fp8., expected awq, gptq, auto-round, compressed-t",
        ),
    ],
)
def test_other_configs_are_refused_by_name(
    config: dict[str, Any], match: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, AWQ)
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = config
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=match):
        describe(tmp_path)


def test_quantize_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    with pytest.raises(InvalidRequest, match="quantize is 'int8', expected None"):
        turbomind.Engine(tmp_path, quantize="int8", device="cpu")


@CPU_ONLY
def test_the_head_alone_is_quantized(open_engine: Open, tmp_path: Path) -> None:
    checkpoint(tmp_path, AWQ)
    plain, small = open_engine(tmp_path), open_engine(tmp_path, head="int8")
    formats = {slot.name: slot.format for slot in small.info.slots if slot.linear}
    assert formats.pop("embed") == "int8"  # the tied head
    assert formats.items() <= {slot.name: slot.format for slot in plain.info.slots}.items()
    ids = prompt(40, plain.vocab_size)
    assert 0 < divergence(plain.logits(ids), small.logits(ids)) < 0.05


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_real_configs_are_read(method: str) -> None:
    known = json.loads(asset("configs/quantization_configs.json").read_text())
    scheme_of(quantization(known[method]["quantization_config"]), None)
