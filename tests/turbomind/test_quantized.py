"""Quantized weights: their values, the results with them, and settings that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import Zoo, prompt, reference_logits
from divergences import divergence, round_to_int8

import turbomind
from lmchat.bundled import bundled_model
from turbomind import _C, InvalidRequest, ModelError
from turbomind.loading.loader import describe
from turbomind.loading.quantize import Quantize, read_quantize

Open = Callable[..., turbomind.Engine]
Values = npt.NDArray[np.float32]

CPU_ONLY = pytest.mark.cpu_only("a GPU refuses quantized weights")
ISAS = devices.isas()
# What a user asks for -> the formats of the layers and of the head.
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int8, keep head": {"quantize": "int8", "head": "keep"},
    "int4": {"quantize": "int4"},
    "int4, groups of 32, head int4": {"quantize": "int4", "group_size": 32, "head": "int4"},
}


def int8_values(w: Values) -> Values:
    """Symmetric, one scale per row."""
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(w / np.where(scale == 0, np.float32(1), scale))
    return (codes * scale).astype(np.float32)


def int4_values(w: Values, group: int) -> Values:
    """Asymmetric, a bfloat16 scale and minimum per group of a row."""
    out = np.empty_like(w)
    for begin in range(0, w.shape[1], group):
        part = w[:, begin : begin + group]
        low, high = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
        minimum, scale = bfloat16(low), bfloat16((high - low) / np.float32(15))
        codes = np.rint(np.clip((part - minimum) / np.where(scale == 0, 1, scale), 0, 15))
        out[:, begin : begin + group] = scale * codes.astype(np.float32) + minimum
    return out


def bfloat16(values: Values) -> Values:
    """Rounds to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


SHAPES = [(1, 1), (16, 128), (35, 300), (40, 704)]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_int4_values_are_those_of_the_rule(shape: tuple[int, int], group: int) -> None:
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w[shape[0] // 2] = 0.3  # one value: its group has a scale of zero
    values = _C.test_unpack(_C.code_format(4, group, "bfloat16", "minimum"), w)
    assert np.array_equal(values, int4_values(w, group))
    assert np.abs(values - w).max() <= np.ptp(w) / 15 / 2 + np.abs(w).max() / 128


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_int8_values_are_those_of_the_rule(shape: tuple[int, int]) -> None:
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    w[shape[0] // 2] = 0
    values = _C.test_unpack("int8", w)
    assert np.array_equal(values, int8_values(w))
    assert np.abs(values - w).max() <= np.abs(w).max() / 127 / 2 * 1.001


def quantized_reference(
    model: Any, quantize: str, head: str = "int8", group_size: int = 128
) -> Any:
    """Returns a copy with the values that unpacking gives, whose products round their input."""
    import torch

    model = copy.deepcopy(model)
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        method = head if module is model.get_output_embeddings() else quantize
        if method == "keep":
            continue
        weight = module.weight.detach().numpy()
        values = int8_values(weight) if method == "int8" else int4_values(weight, group_size)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(values))
        group = 128 if method == "int8" else group_size
        module.register_forward_pre_hook(
            lambda _, inputs, group=group: (round_to_int8(inputs[0], group),)
        )
    return model


@CPU_ONLY
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama_gqa_biases_tied", "qwen3_bias_window"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_are_those_of_transformers_with_the_quantized_values(
    setting: str, name: str, isa: str, zoo: Zoo, open_engine: Open
) -> None:
    engine = open_engine(zoo.folder(name), isa=isa, dtype="float32", **SETTINGS[setting])
    model = quantized_reference(zoo.model(name), **SETTINGS[setting])
    ids = prompt(100, model.config.vocab_size)
    theirs, ours = reference_logits(model, ids), engine.logits(ids)
    assert divergence(theirs, ours) <= 1e-3
    kept = reference_logits(zoo.model(name), ids)
    assert divergence(theirs, ours) < divergence(theirs, kept), (
        "closer to the weights before quantization"
    )


@CPU_ONLY
def test_sizes_are_those_of_the_packed_formats(zoo: Zoo, open_engine: Open) -> None:
    folder = zoo.folder("qwen3_bias_window")
    plain = open_engine(folder, dtype="bfloat16")
    kept = open_engine(folder, dtype="bfloat16", quantize="int8", head="keep")
    small = open_engine(folder, dtype="bfloat16", quantize="int8")
    assert plain.info.weights_text == "bfloat16"
    assert sorted(kept.info.weights_text.split(" and ")) == ["bfloat16", "int8"]
    for engine in (plain, kept, small):  # but for the alignment of slots
        assert 0 <= engine.weight_bytes - engine.info.weight_bytes < 256 * len(engine.info.slots)
    formats = {slot.name: slot.format for slot in small.info.slots if slot.linear}
    tied = small.info.description.tied_head
    assert formats["embed"] == ("int8" if tied else "bfloat16")
    assert set(formats.values()) - {formats["embed"]} <= {"int8"}
    assert {s.format for s in kept.info.slots if s.name in ("head", "embed")} == {"bfloat16"}


@CPU_ONLY
@pytest.mark.parametrize(
    ("quantize", "bits"),
    [
        (Quantize("int8"), 8),
        (Quantize("int4", "int4", 32), 5),
        (Quantize("int4", "int4", 64), 4.5),
        (Quantize("int4", "int4"), 4.25),
    ],
)
def test_a_quantized_matrix_has_the_bits_of_its_format(quantize: Quantize, bits: float) -> None:
    plain, small = (
        describe(bundled_model(), dtype="bfloat16", quantize=each) for each in (None, quantize)
    )
    assert plain.description.tied_head
    ratio = small.step_weight_bytes() / plain.step_weight_bytes()
    assert bits / 16 <= ratio <= bits / 16 * 1.06  # K of 704 is 5.5 blocks, and scales of rows


INT8 = Quantize("int8")


@CPU_ONLY
def test_kv_of_other_formats_is_not_reused() -> None:
    from turbomind.loading.loader import fingerprint

    settings = (
        None,
        INT8,
        Quantize("int8", "keep"),
        Quantize("int4"),
        Quantize("int4", "int8", 64),
    )
    infos = [describe(bundled_model(), quantize=quantize) for quantize in settings]
    assert len({fingerprint(info, "weights") for info in infos}) == len(infos)


@CPU_ONLY
@pytest.mark.parametrize(("setting", "limit"), [("int8", 0.003), ("int4", 0.05)])
def test_memo_predicts_nearly_as_without_quantization(
    setting: str, limit: float, open_engine: Open
) -> None:
    plain = open_engine(bundled_model(), dtype="bfloat16")
    small = open_engine(bundled_model(), dtype="bfloat16", **SETTINGS[setting])
    divergences = []
    for ids in dialogues(bundled_model()):
        divergences.append(divergence(plain.logits(ids)[5:], small.logits(ids)[5:]))
    assert 0 < np.mean(divergences) <= limit


def dialogues(folder: Path) -> list[list[int]]:
    """Returns dialogues as memo reads them, in token ids."""
    from lmchat.text.template import ChatTemplate
    from lmchat.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    texts = [
        ["Hi! My name is Anna and I live in Oslo.", "Nice to meet you, Anna!", "Where do I live?",
         "You live in Oslo.", "Thank you. And what is my name?", "Your name is Anna."],
        ["What did you do on Sunday?", "I went for a walk with my dog.", "How old is your dog?",
         "She is three years old and loves the water.", "Mine is afraid of it!"],
    ]  # fmt: skip
    chats = [
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(each)]
        for each in texts
    ]
    return [tokenizer.encode(template.render(chat)) for chat in chats]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int9"}, "quantize is 'int9', expected one of int8, int4"),
        ({"quantize": 8}, "quantize is 8, expected one of int8, int4"),
        ({"quantize": ["int8"]}, "quantize is"),
        ({"quantize": "int8", "head": "int2"}, "head is 'int2', expected one of int8, keep"),
        ({"quantize": "int8", "head": "int4"}, "head is 'int4', expected one of int8, keep"),
        ({"head": "keep"}, "head is 'keep', expected None without quantize"),
        ({"group_size": 64}, "group_size is 64, expected None without quantize"),
        ({"quantize": "int8", "group_size": 64}, "group_size is 64, expected None with quantize"),
        ({"quantize": "int4", "group_size": 16}, "group_size is 16, expected 32, 64 or 128"),
        ({"quantize": "int4", "group_size": True}, "group_size is True, expected 32, 64 or 128"),
        ({"quantize": "int4", "group_size": "64"}, "group_size is '64', expected 32, 64 or 128"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        turbomind.Engine(bundled_model(), **options)


def test_a_gpu_refuses_quantized_weights_by_name() -> None:
    with pytest.raises(ModelError, match=r"embed is int8, expected bfloat16: a GPU has no kernels"):
        turbomind.Engine(bundled_model(), device="cuda_emulated", quantize="int8")


def test_no_quantization_is_none() -> None:
    assert read_quantize(None, None, None) is None
    assert read_quantize("int8", None, None) == INT8
    assert read_quantize("int4", "keep", 64) == Quantize("int4", "keep", 64)


def test_a_format_of_an_unknown_slot_is_refused() -> None:
    core = describe(bundled_model()).to_core()
    core.slot_formats = {"layers.0.router": "int8"}
    with pytest.raises(ModelError, match="slot_formats has layers.0.router as int8"):
        _C.weight_slots(core)
