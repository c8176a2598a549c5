"""Checkpoints of compressed-tensors: values by its library, logits, and files that are refused."""

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
from packed_files import Tensors, change, drop, one_nan, quantization

import turbomind
from turbomind import _C, ModelError
from turbomind.files.checkpoint import Checkpoint
from turbomind.loading.loader import describe
from turbomind.models import Rows
from turbomind.quant.schemes import scheme_of

pytest.importorskip("compressed_tensors", reason="the library needs Python 3.11")

Open = Callable[..., turbomind.Engine]
CPU_ONLY = pytest.mark.cpu_only("a GPU refuses quantized weights")
INPUTS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
PACKED, PLAIN = "pack-quantized", "int-quantized"
# Layout, arguments of the weights, type of the scales.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "int4": (PACKED, {"num_bits": 4, "group_size": 32}, "bfloat16"),
    "int4, zeros": (PACKED, {"num_bits": 4, "group_size": 64, "symmetric": False}, "float16"),
    "int4, per channel": (PACKED, {"num_bits": 4, "strategy": "channel"}, "float32"),
    "int4, per channel, zeros": (
        PACKED, {"num_bits": 4, "strategy": "channel", "symmetric": False}, "bfloat16",
    ),
    "int8": (PACKED, {"num_bits": 8, "group_size": 64}, "bfloat16"),
    "int8, zeros": (PACKED, {"num_bits": 8, "group_size": 32, "symmetric": False}, "float32"),
    "int8, per channel": (PACKED, {"num_bits": 8, "strategy": "channel"}, "bfloat16"),
    "plain int8": (PLAIN, {"num_bits": 8, "strategy": "channel"}, "bfloat16"),
    "plain int8, zeros": (
        PLAIN, {"num_bits": 8, "strategy": "channel", "symmetric": False}, "float16",
    ),
    "plain int4": (PLAIN, {"num_bits": 4, "group_size": 32, "symmetric": False}, "bfloat16"),
}  # fmt: skip


def arguments(weights: dict[str, Any]) -> dict[str, Any]:
    """Returns the field `weights` as tools write it."""
    full = {
        "type": "int", "strategy": "group", "symmetric": True, "dynamic": False, "actorder": None,
        "block_structure": None, "group_size": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    return full | weights


def config(layout: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a quantization_config with one group."""
    group = {
        "targets": ["Linear"],
        "weights": arguments(weights),
        "input_activations": INPUTS if layout == PLAIN else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **changes,
    }


def make(layout: str, weights: dict[str, Any], scale_type: str) -> Callable[..., Any]:
    """Returns what makes the tensors of a module."""
    return lambda _, weight: packed_files.compressed(
        weight, layout, scale_type=scale_type, **arguments(weights)
    )


def checkpoint(
    folder: Path, case: str, more: Callable[[Tensors], None] = lambda tensors: None
) -> Any:
    """Writes a checkpoint and returns transformers' model with its values."""
    layout, weights, scale_type = CASES[case]
    # Rows of 36 codes fill no whole words, nor do zero points of 36 outputs.
    wide = 36 if weights.get("strategy") == "channel" else 192
    sizes = {"intermediate_size": wide, "hidden_size": 128, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "tie_word_embeddings": True})
    parts = make(layout, weights, scale_type)
    packed_files.write(model, folder, config(layout, weights), parts, more)
    return model


@CPU_ONLY
@pytest.mark.parametrize("case", CASES)
def test_values_and_logits_are_those_of_the_library(
    case: str, open_engine: Open, tmp_path: Path
) -> None:
    model, (layout, weights, _) = checkpoint(tmp_path, case), CASES[case]
    scheme = scheme_of(quantization(config(layout, weights)), Checkpoint(tmp_path))
    for module in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = f"model.layers.1.{module}.weight"
        values = model.state_dict()[weight].numpy()
        row = Rows(weight, values.shape, 3, len(values) - 5)
        kind = scheme.kind(row)
        assert kind is not None
        unpacked = _C.test_unpack_codes(kind.format(), scheme.codes(row), 3)
        assert np.array_equal(unpacked[: row.count], values[3:-2])
    engine = open_engine(tmp_path, dtype="float32")
    assert engine.info.weights_text.startswith(f"int{weights['num_bits']}")
    ids = prompt(60, engine.vocab_size)
    theirs = reference_logits(round_inputs(model, weights.get("group_size") or 128), ids)
    assert divergence(theirs, engine.logits(ids)) <= 1e-3


@CPU_ONLY
@pytest.mark.parametrize("case", ["int4", "plain int4"])
def test_columns_in_the_order_of_their_groups(case: str, open_engine: Open, tmp_path: Path) -> None:
    """The library no longer makes `weight_g_idx`, which has the group of each column."""
    layout, weights, scale_type = CASES[case]

    def parts(name: str, weight: np.ndarray) -> Any:
        shared = name.replace("up_proj", "gate_proj").encode()
        order = np.random.default_rng(list(shared)).permutation(weight.shape[1])
        tensors, values = packed_files.compressed(
            weight[:, order], layout, scale_type=scale_type, **arguments(weights)
        )
        back = np.argsort(order)
        group = np.arange(len(order)) // 32
        codes = tensors.get("weight")
        if codes is None:
            codes = tensors["weight_packed"].view(np.uint8)
            nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
            tensors["weight_packed"] = packed_files.pack(nibbles[:, back], 4)
        else:
            tensors["weight"] = np.ascontiguousarray(codes[:, back])
        tensors["weight_g_idx"] = group[back].astype(np.int32)
        return tensors, np.ascontiguousarray(values[:, back])

    sizes = {"intermediate_size": 192, "hidden_size": 128, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "tie_word_embeddings": True})
    ordered = config(layout, {**weights, "actorder": "group"})
    packed_files.write(model, tmp_path, ordered, parts)
    scheme = scheme_of(quantization(ordered), Checkpoint(tmp_path))
    weight = "model.layers.1.mlp.down_proj.weight"
    values = model.state_dict()[weight].numpy()
    codes = scheme.codes(Rows(weight, values.shape, 0, len(values)))
    kind = scheme.kind(Rows(weight, values.shape, 0, len(values)))
    assert kind is not None
    assert kind.ordered
    assert np.array_equal(_C.test_unpack_codes(kind.format(), codes), values)
    ids = prompt(60, model.config.vocab_size)
    logits = open_engine(tmp_path, dtype="float32").logits(ids)
    theirs = reference_logits(round_inputs(model, 32, packed_files.column_orders(tmp_path)), ids)
    assert divergence(theirs, logits) <= 1e-3


@CPU_ONLY
def test_groups_of_minus_one_are_in_the_order_of_columns(open_engine: Open, tmp_path: Path) -> None:
    """Tools leave a `weight_g_idx` as it was made where they did not order the columns."""
    layout, weights, scale_type = CASES["int4"]

    def parts(name: str, weight: np.ndarray) -> Any:
        tensors, values = make(layout, weights, scale_type)(name, weight)
        return {**tensors, "weight_g_idx": np.full(weight.shape[1], -1, np.int32)}, values

    sizes = {"intermediate_size": 192, "hidden_size": 128, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "tie_word_embeddings": True})
    packed_files.write(model, tmp_path, config(layout, {**weights, "actorder": "group"}), parts)
    ids = prompt(60, model.config.vocab_size)
    theirs = reference_logits(round_inputs(model, 32), ids)
    assert divergence(theirs, open_engine(tmp_path, dtype="float32").logits(ids)) <= 1e-3


def mixed(folder: Path, **changes: Any) -> Any:
    """Writes a checkpoint with groups of modules by pattern, by name and by class, with a layer
    that has no codes."""
    kinds = {
        "int4": (["Linear"], {"num_bits": 4, "group_size": 64}),
        "int8": (["re:.*v_proj$", "re:([a-z0-9_.]+)+Z"], {"num_bits": 8, "strategy": "channel"}),
        "wide": (["model.layers.1.mlp.down_proj"], {"num_bits": 8, "group_size": 128}),
    }
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    model = make_model("Qwen2", {**sizes, "num_hidden_layers": 3, "tie_word_embeddings": False})

    def parts(name: str, weight: np.ndarray) -> Any:
        if name.startswith("model.layers.0."):
            return {"weight": weight}, weight
        kind = "int8" if "v_proj" in name else "wide" if name in kinds["wide"][0] else "int4"
        return make(PACKED, kinds[kind][1], "bfloat16")(name, weight)

    group = config(PACKED, {})["config_groups"]["group_0"]
    groups = {
        name: {**group, "targets": targets, "weights": arguments(weights), "format": PACKED}
        for name, (targets, weights) in kinds.items()
    }
    values = config(PACKED, {}, config_groups=groups, ignore=["lm_head", r"re:.*layers\.0\..*"])
    packed_files.write(model, folder, {**values, **changes}, parts)
    return model


@CPU_ONLY
def test_groups_of_modules_have_their_formats(open_engine: Open, tmp_path: Path) -> None:
    model = mixed(tmp_path)
    engine = open_engine(tmp_path, dtype="float32")
    formats = {slot.name: slot.format for slot in engine.info.slots if slot.linear}
    small = "int4-g64-bfloat16"
    assert formats["layers.1.qkv"] == formats["layers.2.qkv"] == f"192 {small} + 64 int8"
    assert formats["layers.1.down"] == "int8-g128-bfloat16"
    assert formats["layers.2.down"] == formats["layers.2.gate_up"] == small
    dense = {name for name, each in formats.items() if each == "float32"}
    assert {name.split(".")[1] for name in dense if "layers" in name} == {"0"}
    assert "head" in dense
    ids = prompt(60, engine.vocab_size)
    assert divergence(reference_logits(model, ids), engine.logits(ids)) <= 0.02
    small_head = open_engine(tmp_path, head="int8")
    assert {slot.name: slot.format for slot in small_head.info.slots}["head"] == "int8"
    with pytest.raises(turbomind.InvalidRequest, match="quantize is 'int4', expected None"):
        open_engine(tmp_path, quantize="int4")


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore": [r"re:^(?!model\.layers\.[12]\.).*$"]},
        {"ignore": ["lm_head", r"re:.*\.(?:(?!1|2)[0-9]+)\..*"]},
        {"targets": r"re:.*(?<!q_proj)(?<=v_proj)$"},
        {"targets": r"re:.*self_attn\.(?!q|k|o)\w+"},
    ],
)
def test_patterns_may_look_around(changes: dict[str, Any], tmp_path: Path) -> None:
    mixed(tmp_path)
    formats = describe(tmp_path).formats
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    quantization = values["quantization_config"]
    if "ignore" in changes:
        quantization["ignore"] = changes["ignore"]
    else:
        quantization["config_groups"]["int8"]["targets"] = [changes["targets"]]
    path.write_text(json.dumps(values))
    assert describe(tmp_path).formats == formats


def test_a_config_alone_has_the_formats_of_its_groups(tmp_path: Path) -> None:
    mixed(tmp_path)
    stored = dict(describe(tmp_path, dtype="float16").formats)
    (tmp_path / "model.safetensors").unlink()
    alone = describe(tmp_path, dtype="float16").formats
    assert {name: each.replace("bfloat16", "float16") for name, each in stored.items()} == alone


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ignore": ["re:.*q_proj"]}, r"layers.1.self_attn.q_proj is stored as codes, expected it"),
        ({"ignore": ["Linear"]}, "is stored as codes, expected it among the targets"),
        ({"ignore": [r"re:(x)\1"]}, "ignore has the pattern .*expected one without backreferences"),
        ({"ignore": [r"re:(?=.*(x)\1)"]}, "expected one without backreferences .groupref is not"),
        (
            {"ignore": [r"re:(?!.*q_proj)"]},
            "self_attn.k_proj is stored as codes, expected it among",
        ),
        ({"ignore": ["re:(?:x{1,999}){1,999}"]}, "Compiled regex exceeds size limit"),
        ({"ignore": ["re:("]}, "pattern 're:.', .*unclosed group"),
        ({"ignore": [f"re:{i}" for i in range(101)]}, "ignore has too many patterns, expected 100"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head', expected a list of strings"),
        ({"ignore": [3]}, r"ignore is \[3\], expected a list of strings"),
    ],
)
def test_targets_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    mixed(tmp_path, **changes)
    with pytest.raises(ModelError, match=match):
        describe(tmp_path)


Q = "model.layers.1.self_attn.q_proj"


@CPU_ONLY
@pytest.mark.parametrize(
    ("case", "more", "match"),
    [
        ("int4", drop(f"{Q}.weight_scale"), f"tensor {Q}.weight_scale is missing"),
        ("int4", drop(f"{Q}.weight_shape"), f"tensor {Q}.weight_shape is missing"),
        ("int4", drop(f"{Q}.weight_packed"), f"tensor {Q}.weight is missing"),
        ("int4, zeros", drop(f"{Q}.weight_zero_point"), f"tensor {Q}.weight_zero_point is missing"),
        ("int4", change(f"{Q}.weight_shape", lambda s: s + 1), r"shape is \(129, 129\), expected"),
        ("int4", change(f"{Q}.weight_packed", lambda w: w[:, :8]), "weight_packed has shape"),
        ("int4", change(f"{Q}.weight_packed", lambda w: w.view("f4")), "weight_packed has dtype F"),
        ("int4, per channel", change(f"{Q}.weight_scale", one_nan), "layers.1.qkv"),
        ("plain int8", change(f"{Q}.weight", lambda w: w[:3]), f"tensor {Q}.weight has shape"),
        ("plain int4", change(f"{Q}.weight", lambda w: w + 9), f"{Q}.weight has values from .*-8"),
        ("plain int4", change(f"{Q}.weight_zero_point", lambda z: z - 9), "zero_point has values"),
        ("int4", lambda t: t.update({f"{Q}.weight_zero_point": np.zeros(4, "i4")}), "no use for"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused_and_an_engine_beside_runs_on(
    case: str, more: Callable[[Tensors], None], match: str, open_engine: Open, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "good", case)
    beside = open_engine(tmp_path / "good")
    expected = beside.logits([3, 4, 5])
    checkpoint(tmp_path / "bad", case, more)
    with pytest.raises(ModelError, match=match):
        open_engine(tmp_path / "bad")
    assert (beside.logits([3, 4, 5]) == expected).all()


GROUP = "config_groups: group_0: "


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("format", "marlin-24", "quantization_config: format is 'marlin-24', expected"),
        ("format", None, "quantization_config: format is None, expected 'pack-quantized' or"),
        ("quantization_status", "calibration", "quantization_status is 'calibration', expected"),
        ("sparsity_config", {"format": "sparse-24"}, "sparsity_config is .*expected an empty obj"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transform_config is .*expected an em"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is .*expected an empty object"),
        ("moe_sparsity_config", {"x": 1}, "moe_sparsity_config is .*expected an empty object"),
        ("config_groups", {}, "config_groups is {}, expected an object of groups"),
        ("config_groups", {"W4A16": ["Linear"]}, "config_groups: W4A16 is .*expected an object"),
        ("group_0.targets", "Linear", f"{GROUP}targets is 'Linear', expected a list"),
        ("group_0.weights", None, f"{GROUP}weights is None, expected an object"),
        ("group_0.format", "float-quantized", f"{GROUP}format is 'float-quantized', expected"),
        ("group_0.output_activations", INPUTS, f"{GROUP}output_activations is .*expected no"),
        ("group_0.weights.num_bits", 3, f"{GROUP}weights: num_bits is 3, expected 4 or 8"),
        ("group_0.weights.type", "float", f"{GROUP}weights: type is 'float', expected 'int'"),
        ("group_0.weights.strategy", "tensor", f"{GROUP}weights: strategy is 'tensor', expected"),
        ("group_0.weights.strategy", "channel", f"{GROUP}weights: group_size is 32, expected -1"),
        ("group_0.weights.group_size", 48, f"{GROUP}weights: group_size is 48, expected -1 or a"),
        ("group_0.weights.group_size", None, f"{GROUP}weights: group_size is None, expected an in"),
        ("group_0.weights.dynamic", True, f"{GROUP}weights: dynamic is True, expected false"),
        ("group_0.weights.actorder", True, f"{GROUP}weights: actorder is True, expected None or"),
        ("group_0.weights.block_structure", [8, 8], f"{GROUP}weights: block_structure is"),
        ("group_0.input_activations", 8, f"{GROUP}input_activations is 8, expected an object"),
        (
            "group_0.input_activations",
            {**INPUTS, "dynamic": False},
            f"{GROUP}input_activations: dynamic is False, expected true",
        ),
        (
            "group_0.input_activations",
            {**INPUTS, "num_bits": 4},
            f"{GROUP}input_activations: num_bits is 4, expected 8",
        ),
    ],
)
def test_other_configs_are_refused_by_name(path: str, value: Any, match: str) -> None:
    values = config(PACKED, CASES["int4"][1])
    inner, names = values, path.split(".")
    for name in (["config_groups"] if names[0] == "group_0" else []) + names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    with pytest.raises(ModelError, match=match):
        scheme_of(quantization(values), None)


def test_real_configs_are_read_or_refused_by_name() -> None:
    known = json.loads(asset("configs/quantization_configs.json").read_text())
    scheme_of(quantization(known["compressed_tensors_w8a8_int8"]["quantization_config"]), None)
    with pytest.raises(ModelError, match="format is 'float-quantized', expected"):
        scheme_of(quantization(known["compressed_tensors_llama4"]["quantization_config"]), None)
