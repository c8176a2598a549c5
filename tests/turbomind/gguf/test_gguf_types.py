"""Quantized GGUF files: values of each type, logits of transformers, and files that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import make_model, prompt, reference_logits
from divergences import divergence, round_to_int8

import turbomind
from turbomind import _C, InvalidRequest, ModelError
from turbomind.gguf.blocks import KINDS
from turbomind.gguf.file import GgufFile
from turbomind.gguf.tensors import tensor_name
from turbomind.loading.loader import describe, fingerprint

Open = Callable[..., turbomind.Engine]
Type = gguf.GGMLQuantizationType
CPU_ONLY = pytest.mark.cpu_only("a GPU refuses quantized weights")

# A name's end -> type, else the first. Q4_K_M has two types inside q, k, v; a width of 64 has none
# of 256 columns, as that of 896 of Qwen2.5 0.5B.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Type]]] = {
    "Q8_0": ("Qwen2", {}, {"": Type.Q8_0}),
    "Q4_0": ("Llama", {}, {"": Type.Q4_0, "output.weight": Type.Q8_0}),
    "fallbacks": (
        "Qwen3",
        {"head_dim": 128},  # transformers takes no other from such a file
        {"": Type.Q5_0, "attn_k.weight": Type.Q5_1, "attn_v.weight": Type.Q8_0,
         "ffn_down.weight": Type.Q4_1, "token_embd.weight": Type.F16},
    ),
    "Q4_K_M": (
        "Llama",
        {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True},
        {"": Type.Q4_K, "attn_v.weight": Type.Q6_K, "ffn_down.weight": Type.Q6_K,
         "token_embd.weight": Type.Q6_K},
    ),
    "Q4_K_M of Qwen2.5 0.5B": (
        "Qwen2",
        {"intermediate_size": 256, "tie_word_embeddings": True},
        {"": Type.Q5_0, "attn_v.weight": Type.Q8_0, "blk.0.ffn_down.weight": Type.Q6_K,
         "blk.1.ffn_down.weight": Type.Q4_K, "token_embd.weight": Type.Q8_0},
    ),
    "Q4_K_M of Qwen3": (
        "Qwen3",
        {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128},
        {"": Type.Q4_K, "attn_v.weight": Type.Q6_K, "ffn_down.weight": Type.Q6_K,
         "output.weight": Type.Q6_K},
    ),
    "Q4_K_M of Qwen3 30B-A3B": (
        "Qwen3Moe",
        {"hidden_size": 256, "head_dim": 128, "num_experts": 5, "num_experts_per_tok": 2,
         "moe_intermediate_size": 768, "norm_topk_prob": True},  # 768 as head_dim above
        {"": Type.Q4_K, "attn_v.weight": Type.Q6_K, "blk.0.ffn_down_exps.weight": Type.Q6_K,
         "ffn_gate_inp.weight": Type.F32, "output.weight": Type.Q6_K},
    ),
    "Q5_K_M": (
        "Qwen2",
        {"hidden_size": 256, "intermediate_size": 256},
        {"": Type.Q5_K, "attn_v.weight": Type.BF16, "ffn_down.weight": Type.Q6_K},
    ),
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """Writes one of FILES and returns its path."""
    family, changes, types = FILES[name]
    sizes = {"intermediate_size": 128, "tie_word_embeddings": False}
    model = make_model(family, {**sizes, **changes})
    model.save_pretrained(folder / "hf")

    def kind(tensor: str) -> Type:
        return next(
            (each for end, each in types.items() if end and tensor.endswith(end)), types[""]
        )

    size = {f"{family.lower()}.vocab_size": model.config.vocab_size}  # transformers wants it
    return gguf_files.write_gguf(folder / "hf", folder / f"{name}.gguf", kind, changes=size)


def reference(path: Path) -> Any:
    """Returns transformers' model of a file, with the values that the library reads.

    Products with codes round their input, as ours do, in groups of 32.
    """
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, experts_implementation="eager"
    )
    file = GgufFile(path)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            held = tensor_name(file, f"{name}.weight")
            stored = file.tensors.get(held, file.tensors["token_embd.weight"])
            if stored.dtype in KINDS:
                module.register_forward_pre_hook(lambda _, x: (round_to_int8(x[0], 32),))
        elif name.endswith(".experts"):
            round_inputs_of_experts(module)
    return model.eval()


def round_inputs_of_experts(module: Any) -> None:
    """Makes the products of a module with experts, which are no modules, round their input."""
    import torch

    class Rounding(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), options: Any = None
        ) -> Any:
            if function is torch.nn.functional.linear:
                args = (round_to_int8(args[0], 32), *args[1:])
            return function(*args, **(options or {}))

    forward = module.forward

    def rounded(*args: Any) -> Any:
        with Rounding():
            return forward(*args)

    module.forward = rounded


@pytest.mark.parametrize("name", KINDS)
def test_values_of_every_type_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    rows, columns = 37, 768
    values = np.random.default_rng(1).normal(size=(rows, columns)).astype(np.float32)
    data = gguf_files.blocks(values, Type[name])
    theirs = gguf.dequantize(data, Type[name]).reshape(rows, columns)
    path = tmp_path / "blocks"
    path.write_bytes(b"head" + data.tobytes())
    with path.open("rb") as file:
        source = _C.SourceFile(str(path), file.fileno(), 4, data.nbytes)
        codes = _C.block_codes("x", name, source, rows, columns)
        ours = [_C.test_unpack_codes(KINDS[name].format(), codes, begin) for begin in (0, 5)]
    assert np.array_equal(ours[0], theirs)
    assert np.array_equal(ours[1], theirs[5:])
    assert np.ptp(theirs) > 1


@CPU_ONLY
@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers_with_the_values_of_the_file(
    name: str, open_engine: Open, tmp_path: Path
) -> None:
    path = write(name, tmp_path)
    engine = open_engine(path, dtype="float32")
    ids = prompt(100, engine.vocab_size)
    theirs, ours = reference_logits(reference(path), ids), engine.logits(ids)
    assert divergence(theirs, ours) <= 1e-3
    assert np.abs(theirs).max() > 1
    ids = prompt(20, engine.vocab_size, seed=3)  # a step of few rows has another kernel
    assert (engine.logits(ids)[:5] == engine.logits(ids[:5])).all()


@CPU_ONLY
def test_formats_are_those_of_the_tensors(tmp_path: Path) -> None:
    info = describe(write("Q4_K_M", tmp_path))
    assert info.dtype == "bfloat16"  # of what is not quantized
    formats = {slot.name: slot.format for slot in info.slots if slot.linear}
    small, large = "int4-g32-factor-minimum", "int8-g16-factor"
    assert formats["embed"] == formats["layers.0.down"] == large
    assert formats["layers.1.qkv"] == f"384 {small} + 128 {large}"
    assert formats["layers.0.gate_up"] == formats["layers.1.o"] == small
    plain = describe(tmp_path / "hf")
    assert fingerprint(info, "same") != fingerprint(plain, "same")
    assert info.weight_bytes < plain.weight_bytes / 4


@CPU_ONLY
def test_formats_of_experts_are_those_of_the_tensors_that_stack_them(tmp_path: Path) -> None:
    info = describe(write("Q4_K_M of Qwen3 30B-A3B", tmp_path))
    formats = {slot.name: slot.format for slot in info.slots if slot.linear}
    small, large = "int4-g32-factor-minimum", "int8-g16-factor"
    for expert in range(5):
        assert formats[f"layers.1.experts.{expert}.gate_up"] == small
        assert formats[f"layers.0.experts.{expert}.down"] == large
        assert formats[f"layers.1.experts.{expert}.down"] == small
    assert formats["layers.1.router"] == "float32"


def test_what_a_quantized_file_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    path = write("Q8_0", tmp_path)
    with pytest.raises(InvalidRequest, match=r"quantize is 'int8', expected None: .*Q8_0.gguf has"):
        turbomind.Engine(path, quantize="int8", device="cpu")
    with pytest.raises(InvalidRequest, match=r"head is 'int8', expected None: .*as int8-g32"):
        turbomind.Engine(path, head="int8", device="cpu")
    with pytest.raises(ModelError, match="a GPU has no kernels"):
        turbomind.Engine(path, device="cuda_emulated")
    FILES["differ"] = ("Llama", {}, {"": Type.Q8_0, "ffn_up.weight": Type.Q4_0})
    match = (
        r"layers.0.gate_up: blk.0.ffn_gate.weight as int8.*, blk.0.ffn_up.weight as int4.*one for"
    )
    with pytest.raises(ModelError, match=match):
        turbomind.Engine(write("differ", tmp_path), device="cpu")


def test_types_without_a_reader_are_refused_by_name(tmp_path: Path) -> None:
    path = write("Q4_0", tmp_path)
    place = path.read_bytes().index(b"blk.0.attn_output.weight")
    kind = place + len("blk.0.attn_output.weight") + 4 + 2 * 8
    for number in (20, 16):  # IQ4_NL has blocks of 32, IQ2_XXS of 256
        changed = bytearray(path.read_bytes())
        changed[kind : kind + 4] = number.to_bytes(4, "little")
        other = path.with_name("other.gguf")
        other.write_bytes(changed)
        match = (
            "has dtype IQ4_NL, expected one of" if number == 20 else "expected a multiple of 256"
        )
        with pytest.raises(ModelError, match=f"tensor blk.0.attn_output.weight .*{match}"):
            turbomind.Engine(other, device="cpu")


@CPU_ONLY
@pytest.mark.parametrize(("name", "at"), [("Q8_0", 0), ("Q4_K_M", 2), ("Q4_K_M", 0)])
def test_scales_that_are_not_finite_are_refused_and_an_engine_beside_runs_on(
    name: str, at: int, open_engine: Open, tmp_path: Path
) -> None:
    path = write(name, tmp_path)
    beside = open_engine(path)
    expected = beside.logits([3, 4, 5])
    tensor = GgufFile(path).tensors["blk.1.attn_k.weight"]
    changed = bytearray(path.read_bytes())
    changed[tensor.begin + at : tensor.begin + at + 2] = np.float16("nan").tobytes()
    other = path.with_name("other.gguf")
    other.write_bytes(changed)
    with pytest.raises(ModelError, match=r"layers.1.qkv"):
        open_engine(other)
    assert (beside.logits([3, 4, 5]) == expected).all()
