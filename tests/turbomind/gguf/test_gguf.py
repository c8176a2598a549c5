"""GGUF files: logits of the folder they were made of, metadata, and files that are damaged."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from checkpoints import SMALL, Zoo, prompt, reference_logits, write_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import turbomind
from turbomind import ModelError, NotFound
from turbomind.gguf.file import GgufFile
from turbomind.loading.loader import describe, fingerprint

Open = Callable[..., turbomind.Engine]
F16, BF16 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16
Q2_K = gguf.GGMLQuantizationType.Q2_K


# --- models ---------------------------------------------------------------------------------------


def rope_divisors(config: dict[str, Any]) -> np.ndarray:
    """Returns Llama 3's divisors as llama.cpp's converter writes them, float32 [head_dim / 2]."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    frequencies = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    wavelengths = 2 * math.pi / frequencies
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    divisors: np.ndarray = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return divisors


@pytest.mark.parametrize(
    "name",
    ["llama_gqa_biases_tied", "llama_mqa_80", "llama_linear", "llama_llama3", "llama_yarn", "qwen2",
     "qwen3", "gemma", "gemma2_file", "gemma3_file", "phi3", "phi3_longrope", "granite", "smollm3",
     "mixtral", "olmoe", "qwen3_moe", "granite_moe", "qwen2_moe_file", "gpt_oss", "gemma4",
     "gemma4_per_layer", "gemma4_shared", "gemma4_moe"],
)  # fmt: skip
def test_a_file_has_the_logits_of_transformers(
    name: str, zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    folder = zoo.folder(name)
    config = json.loads((folder / "config.json").read_text())
    more = gguf_files.rope_factors(config) if name == "phi3_longrope" else {}
    if name.startswith("gemma4"):
        more = {"rope_freqs.weight": gguf_files.proportional_divisors(config)}
    if name == "llama_llama3":
        more = {"rope_freqs.weight": rope_divisors(config)}
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", more=more)
    engine = open_engine(path)
    ids = prompt(150, engine.vocab_size)
    ours, theirs = engine.logits(ids), reference_logits(zoo.model(name), ids)
    assert engine.info.description.tied_head == bool(config.get("tie_word_embeddings"))
    assert engine.info.unknown_fields == ()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    if not engine.info.description.rope.interleaved:  # else rows are in another order
        assert (ours == open_engine(folder).logits(ids)).all()


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("qwen2vl", "qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}),
        ("qwen3vl", "qwen3", {"rope.dimension_sections": [4, 4, 4, 0], "n_deepstack_layers": 3}),
        ("qwen3vlmoe", "qwen3_moe", {"rope.dimension_sections": [4, 4, 4, 0]}),
        ("mistral3", "mistral_full", {"attention.temperature_scale": 0.0}),
    ],
)
def test_language_models_of_wrappers_have_the_logits_of_transformers(
    kind: str, name: str, more: dict[str, Any], zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    changes = {f"{kind}.{key}": value for key, value in more.items()}
    path = gguf_files.write_gguf(
        zoo.folder(name), tmp_path / "model.gguf", kind=kind, changes=changes
    )
    ids = prompt(100, SMALL["vocab_size"])
    ours, theirs = open_engine(path).logits(ids), reference_logits(zoo.model(name), ids)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert describe(path).unknown_fields == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_files_have_the_bits_of_16_bit_folders(
    dtype: str, zoo: Zoo, open_engine: Open, tmp_path: Path
) -> None:
    types = {"float16": F16, "bfloat16": BF16}
    path = gguf_files.write_gguf(
        zoo.folder("qwen3"), tmp_path / "model.gguf", lambda name: types[dtype]
    )
    engine = open_engine(path)
    assert engine.info.dtype == dtype
    ids = prompt(80, SMALL["vocab_size"])
    folder = open_engine(zoo.folder("qwen3"), dtype=dtype)
    assert (engine.logits(ids) == folder.logits(ids)).all()


def test_nothing_beside_a_file_is_read(zoo: Zoo, tmp_path: Path) -> None:
    path = gguf_files.write_gguf(zoo.folder("qwen2"), tmp_path / "model.bin")
    before = describe(path)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("no JSON")
    after = describe(path)
    assert after.description == before.description
    assert (after.dtype, after.eos_token_ids) == (before.dtype, before.eos_token_ids)
    turbomind.Engine(path, threads=1, cache_memory="16MiB").close()


def test_a_folder_with_gguf_files_says_so(zoo: Zoo, tmp_path: Path) -> None:
    gguf_files.write_gguf(zoo.folder("qwen2"), tmp_path / "small.gguf")
    with pytest.raises(
        NotFound, match=r"has no config.json; name a GGUF file in it, such as small"
    ):
        describe(tmp_path)


def test_the_fingerprint_covers_the_rotation_and_the_divisors(zoo: Zoo, tmp_path: Path) -> None:
    folder = zoo.folder("llama_mha")
    plain = describe(gguf_files.write_gguf(folder, tmp_path / "plain.gguf"))
    divided = {"rope_freqs.weight": np.full(8, 2.0, np.float32)}
    other = describe(gguf_files.write_gguf(folder, tmp_path / "other.gguf", more=divided))
    prints = {fingerprint(info, "same") for info in (describe(folder), plain, other)}
    assert len(prints) == 3


# --- metadata -------------------------------------------------------------------------------------


def tiny(tmp_path: Path, **options: Any) -> Path:
    return gguf_files.write_gguf(write_tiny(tmp_path / "tiny"), tmp_path / "model.gguf", **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"llama.expert_count": 8}, "expert_used_count is absent, expected a number"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64, expected"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False, expected True"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, expected the width"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, expected"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.block_count": None}, "llama.block_count is absent, expected a number"),
        ({"llama.block_count": 100_000}, "llama.block_count is 100000, expected an integer"),
        ({"llama.block_count": 2}, "tensor blk.1.* is missing"),
        ({"llama.block_count": [1, 2]}, r"llama.block_count is \[1, 2\], expected an integer"),
        ({"llama.embedding_length": "32"}, "llama.embedding_length is '32', expected an integer"),
        (
            {"llama.attention.head_count_kv": 3},
            "llama.attention.head_count_kv is 3, expected an integer from 1 to 2",
        ),
        ({"llama.context_length": 0}, "llama.context_length is 0, expected an integer"),
        ({"llama.vocab_size": 71}, r"tensor token_embd.weight has shape \(70, 32\), expected"),
        ({"split.count": 2}, "split.count is 2, expected 0 or 1"),
        ({"general.type": "adapter"}, "general.type is 'adapter', expected 'model'"),
        ({"general.quantization_version": 1}, "general.quantization_version is 1, expected 2"),
        ({"general.alignment": 48}, "general.alignment is 48, expected a power of two"),
    ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = tiny(tmp_path, changes=changes)
    with pytest.raises(ModelError, match=match) as caught:
        turbomind.Engine(path, threads=1)
    assert str(path) in str(caught.value)


def of_family(name: str, zoo: Zoo, tmp_path: Path, **changes: Any) -> Path:
    return gguf_files.write_gguf(zoo.folder(name), tmp_path / "model.gguf", changes=changes)


@pytest.mark.parametrize(
    ("name", "changes", "windows", "width"),
    [
        ("gemma2_file", {}, [40, 0, 40], 24),
        (
            "gemma2_file",
            {"gemma2.attention.sliding_window": None, "gemma2.context_length": 8192},
            [4096, 0, 4096],
            24,
        ),
        ("gemma2_file", {"gemma2.block_count": 46}, 23 * [40, 0], 64 // 4),
        ("gemma3_file", {}, [33, 33, 33, 33, 33, 0, 33], 24),
        ("gemma3_file", {"gemma3.attention.sliding_window": None}, [0] * 7, 24),
        ("gemma3_file", {"gemma3.attention.sliding_window_pattern": 2}, 3 * [33, 0] + [33], 24),
        (
            "gemma3_file",
            {
                "gemma3.attention.sliding_window_pattern": [
                    True,
                    False,
                    False,
                    False,
                    True,
                    True,
                    False,
                ]
            },
            [33, 0, 0, 0, 33, 33, 0],
            24,
        ),
        ("gemma3_file", {"gemma3.block_count": 62}, 10 * [33, 33, 33, 33, 33, 0] + [33, 33], 16),
    ],
)
def test_windows_and_scales_of_gemma_follow_from_the_layers(
    name: str, changes: dict[str, Any], windows: list[int], width: int, zoo: Zoo, tmp_path: Path
) -> None:
    model = describe(of_family(name, zoo, tmp_path, **changes), weights=False).description
    assert [layer.window for layer in model.layers] == windows
    assert {layer.attn_scale for layer in model.layers} == {width**-0.5}


def test_a_scale_that_a_granite_lacks_is_that_of_its_heads(zoo: Zoo, tmp_path: Path) -> None:
    changes = {"granite.attention.scale": None, "granite.embedding_scale": 0.0}
    model = describe(of_family("granite", zoo, tmp_path, **changes)).description
    assert (model.layers[0].attn_scale, model.embed_scale) == (16**-0.5, 1.0)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("granite", {"granite.logit_scale": None}, "logit_scale is absent, expected a number"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned is False, expected True"),
        (
            "gemma3_file",
            {"gemma3.attention.sliding_window_pattern": [1, 0]},
            "7 values or a period",
        ),
        ("gemma3_file", {"gemma3.attention.sliding_window_pattern": "x"}, "is 'x', expected 7 val"),
        (
            "gemma3_file",
            {"gemma3.attention.sliding_window": "x"},
            "attention.sliding_window is 'x'",
        ),
        ("gemma2_file", {"gemma2.attn_logit_softcapping": "x"}, "attn_logit_softcapping is 'x'"),
        (
            "phi3",
            {"phi3.rope.dimension_count": 99},
            "dimension_count is 99, expected a number from",
        ),
        ("phi3", {"phi3.attention.head_count": 0}, "phi3.attention.head_count is 0, expected an"),
        ("mixtral", {"llama.expert_count": "5"}, "llama.expert_count is '5', expected an integer"),
        ("mixtral", {"llama.expert_used_count": 6}, "llama.expert_used_count is 6, expected at mo"),
        ("mixtral", {"llama.expert_used_count": 0}, "llama.expert_used_count is 0, expected an"),
        ("olmoe", {"olmoe.expert_count": None}, "expert_count is absent, expected a number"),
        ("granite_moe", {"granitemoe.expert_count": None}, "expert_count is absent, expected a nu"),
        ("granite_moe", {"granitemoe.logit_scale": None}, "logit_scale is absent, expected a"),
        (
            "granite_moe",
            {"granitemoe.expert_shared_feed_forward_length": 8},
            "granitemoe.expert_shared_feed_forward_length is 8, expected",
        ),
        ("olmoe", {"olmoe.expert_weights_scale": 2.0}, "olmoe.expert_weights_scale is 2.0"),
        (
            "qwen3_moe",
            {"qwen3moe.expert_feed_forward_length": None},
            "expert_feed_forward_length is absent, expected a number",
        ),
        ("gpt_oss", {"gpt-oss.expert_feed_forward_length": None}, "forward_length is absent, exp"),
        (
            "gpt_oss",
            {"gpt-oss.attention.sliding_window": None},
            "sliding_window is absent, expecte",
        ),
        (
            "qwen2_moe_file",
            {"qwen2moe.expert_used_count": 8},
            "expert_used_count is 8, expected at",
        ),
    ],
)
def test_wrong_metadata_of_families_are_refused_by_name(
    name: str, changes: dict[str, Any], match: str, zoo: Zoo, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=match):
        describe(of_family(name, zoo, tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        (
            "mixtral",
            {"llama.expert_count": 6},
            r"ffn_gate_inp.weight has shape \(5, 64\), expected",
        ),
        ("mixtral", {"llama.expert_count": 0}, "llama.expert_used_count is 2, expected 0 or"),
        (
            "granite_moe",
            {"granitemoe.feed_forward_length": 41},
            r"ffn_gate_exps.weight has shape \(6, 40, 64",
        ),
        ("olmoe", {"olmoe.feed_forward_length": 41}, r"ffn_gate_exps.weight has shape \(8, 40, 84"),
    ],
)
def test_experts_are_those_that_the_metadata_tell(
    name: str, changes: dict[str, Any], match: str, zoo: Zoo, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=match):
        turbomind.Engine(of_family(name, zoo, tmp_path, **changes), threads=1)


@pytest.mark.parametrize("name", ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_tensors_of_experts_that_are_missing_are_named(name: str, zoo: Zoo, tmp_path: Path) -> None:
    path = of_family("qwen3_moe", zoo, tmp_path)
    missing = f"blk.1.{name}.weight"
    content = path.read_bytes()
    assert content.count(missing.encode()) == 1
    path.write_bytes(content.replace(missing.encode(), missing.upper().encode()))
    with pytest.raises(ModelError, match=f"tensor {missing} is missing"):
        turbomind.Engine(path, threads=1)


def test_factors_of_a_longrope_are_checked(zoo: Zoo, tmp_path: Path) -> None:
    folder, path = zoo.folder("phi3_longrope"), tmp_path / "model.gguf"
    factors = gguf_files.rope_factors(json.loads((folder / "config.json").read_text()))
    one = {"rope_factors_long.weight": factors["rope_factors_long.weight"]}
    with pytest.raises(ModelError, match="rope_factors_short.weight is missing"):
        describe(gguf_files.write_gguf(folder, path, more=one))
    wrong = {**factors, "rope_factors_short.weight": np.full(12, np.nan, np.float32)}
    with pytest.raises(ModelError, match="rope_factors_short.weight has a value that is not pos"):
        describe(gguf_files.write_gguf(folder, path, more=wrong))


def test_neutral_and_unknown_metadata_are_read_as_those_of_a_config(tmp_path: Path) -> None:
    changes = {
        "llama.expert_count": 0, "llama.attention.head_count": [2], "llama.vocab_size": 70,
        "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0, "new.thing": 1,
        "llama.rope.dimension_count": 16, "general.name": "tiny", "llama.colour": "red",
    }  # fmt: skip
    info = describe(tiny(tmp_path, changes=changes))
    assert info.unknown_fields == ("new_thing", "colour")
    assert info.rope_type == "default"
    assert info.description.layers[0].heads == 2
    assert info.description.rope.interleaved


def test_other_architectures_and_types_are_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="general.architecture is 'mamba', expected one of llama"):
        describe(path)
    path = tiny(tmp_path, more={"x.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(
        ModelError, match="1 tensors that LlamaForCausalLM has no use for: x.weight"
    ):
        turbomind.Engine(path, threads=1)
    divisors = {"rope_freqs.weight": np.array([1, 2, 3, 0, 1, 1, 1, 1], np.float32)}
    with pytest.raises(ModelError, match="rope_freqs.weight has a value that is not positive"):
        describe(tiny(tmp_path, more=divisors))
    with pytest.raises(ModelError, match=r"rope_freqs.weight is F32 \(7,\), expected F32 \(8,\)"):
        describe(tiny(tmp_path, more={"rope_freqs.weight": np.ones(7, np.float32)}))


@pytest.mark.parametrize(
    ("names", "ids", "ends"),
    [
        ({"eos_token_id": 2}, {"<|im_end|>": 5}, (2, 5)),
        ({"eos_token_id": 2}, {"<|end|>": 5, "<turn|>": 6}, (2, 5, 6)),
        # In harmony and in Solar's format it ends a message, but no reply.
        ({"eos_token_id": 2}, {"<|return|>": 2, "<|end|>": 5, "<|call|>": 6}, (2, 6)),
        ({"eos_token_id": 2}, {"<|flush|>": 3, "<|end|>": 5, "<|calls|>": 6}, (2, 3, 6)),
        ({"eos_token_id": 2, "eot_token_id": 3, "eom_token_id": 2}, {}, (2, 3)),
        ({"eos_token_id": 71}, {"<|eot_id|>": 69}, (69,)),
        ({"eos_token_id": 10**6, "eom_token_id": 4}, {"[EOT]": 8, "[EOS]": 9}, (4, 8, 9)),
        ({}, {"<\uff5cend\u2581of\u2581sentence\uff5c>": 8}, (8,)),
        ({}, {"<end_of_utterance>": 8, "[e~[": 9, "</s>": 10}, (8, 9, 10)),
        # Tags of HTML in Gemma's vocabularies, and in byte-level ones.
        ({}, {"</s>": 5, "<eos>": 6, "<|tool_response>": 8, "<end_of_turn>": 9}, (6, 8, 9)),
        ({"model": "gpt2"}, {"</s>": 5, "<|im_end|>": 6}, (6,)),
        ({"model": "gpt2", "eos_token_id": 5}, {"</s>": 5, "<|im_end|>": 6}, (5, 6)),
        ({}, {}, ()),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_end_tokens_come_from_the_metadata(
    names: dict[str, Any],
    ids: dict[str, int],
    ends: tuple[int, ...],
    kind: int,
    tmp_path: Path,
) -> None:
    tokens = [f"t{i}" for i in range(70)]
    kinds = [1] * 70
    for text, i in ids.items():
        tokens[i], kinds[i] = text, kind
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}": value for name, value in names.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    assert describe(tiny(tmp_path, tokenizer=metadata)).eos_token_ids == ends


def test_defaults_of_sampling_come_from_the_metadata(tmp_path: Path) -> None:
    values = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05, "mirostat": 0}
    changes: dict[str, Any] = {f"general.sampling.{key}": value for key, value in values.items()}
    assert describe(tiny(tmp_path, changes=changes)).generation_defaults == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05,
        "do_sample": True,
    }  # fmt: skip
    assert describe(tiny(tmp_path)).generation_defaults == {}
    with pytest.raises(ModelError, match="general.sampling.temp is 'x', expected a number"):
        describe(tiny(tmp_path, changes={"general.sampling.temp": "x"}))


# --- damaged files --------------------------------------------------------------------------------


def header(tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, entries) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(kind: int, value: bytes, key: str = "key") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(shape: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0, dims: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text("t") + struct.pack("<I", dims or len(shape)) + sizes + struct.pack("<IQ", kind, offset)
    )


BIG = 1 << 62


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a GGUF file: 0 bytes"),
        (b"PK\3\4" + bytes(40), r"not a GGUF file.*b'PK"),
        (header(version=1), "GGUF version is 1, expected 2 or 3"),
        (header(version=3 << 24), "expected 2 or 3 of little endian"),
        (header(tensors=BIG), f"{BIG} tensors at byte 16, expected at most 0"),
        (header(entries=BIG), f"{BIG} metadata entries at byte 24, expected at most 0"),
        (header(0, 1, struct.pack("<Q", BIG) + bytes(20)), f"a metadata key has {BIG} bytes"),
        (header(0, 1, entry(8, struct.pack("<Q", 99))), "key takes 99 bytes at byte"),
        (header(0, 1, entry(13, bytes(8))), "key has type 13, expected a type of GGUF"),
        (header(0, 1, entry(4, b"ab")), "key takes 4 bytes at byte"),
        (header(0, 1, entry(9, struct.pack("<IQ", 9, 0))), "key is an array of type 9"),
        (header(0, 1, entry(9, struct.pack("<IQ", 4, BIG))), f"{BIG} values of key"),
        (header(0, 1, entry(9, struct.pack("<IQQ", 8, 1, BIG))), f"of key has {BIG} bytes"),
        (
            header(0, 1, entry(9, struct.pack("<IQ", 8, 5 << 20)) + bytes(40 << 20)),
            f"key has {5 << 20} values, expected at most",
        ),
        (header(0, 200_000) + bytes(13 * 200_000), "200000 metadata entries, expected at most 1"),
        (header(200_000) + bytes(24 * 200_000), "200000 tensors, expected at most 100000"),
        (
            header(0, 1, entry(4, b"abcd", "k\x1b[2J")),
            r"key k\\x1b\[2J has 5 characters, .* printable",
        ),
        (header(0, 1, entry(4, b"abcd", "k" * 5000)), "has 5000 characters, expected at most 4096"),
        (header(0, 2, 2 * entry(0, b"x")), "metadata key is there twice"),
        (header(0, 1, entry(8, struct.pack("<Q", 1) + b"\xff")), "key is .*expected UTF-8"),
        (header(1, 0, tensor() + bytes(40)), r"tensor t is at bytes 96 to 128, expected .* 96 on"),
        (header(1, 0, tensor(offset=8) + bytes(99)), "expected a multiple of 32"),
        (header(1, 0, tensor(offset=BIG) + bytes(99)), "inside the file's 164 bytes"),
        (header(1, 0, tensor((1 << 40, 1 << 40)) + bytes(99)), "inside the file's 164 bytes"),
        (
            header(1, 0, tensor((33, 1), kind=2) + bytes(99)),
            "rows of 33, expected a multiple of 32",
        ),
        (header(1, 0, tensor(kind=77) + bytes(99)), "tensor t has type 77, expected BF16"),
        (header(1, 0, tensor(dims=5) + bytes(99)), "tensor t has 5 dimensions"),
        (header(2, 0, tensor() * 2 + bytes(99)), "tensor t is there twice"),
    ],
)
def test_counts_offsets_and_lengths_that_lie_are_refused(
    data: bytes, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=match) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    second = text("u") + tensor()[9:]
    path.write_bytes(header(2, 0, tensor() + second + bytes(199)))
    with pytest.raises(ModelError, match="tensors t and u overlap"):
        GgufFile(path)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = tiny(tmp_path).read_bytes()
    path = tmp_path / "short.gguf"
    for length in [*range(0, 1200, 7), *range(1200, len(whole) - 64, 997)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="short.gguf"):
            describe(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("gguf"))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_of_a_header_ends_in_another_error(data: st.DataObject, whole: Path) -> None:
    changed = bytearray(whole.read_bytes())
    end = len(GgufFile(whole).header()) - 8
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, end))
        value = data.draw(st.binary(min_size=1, max_size=8))
        changed[place : place + len(value)] = value
    path = whole.with_name("damaged.gguf")
    path.write_bytes(changed)
    with contextlib.suppress(turbomind.Error):
        turbomind.Engine(path, threads=1, cache_pages=2, warm_up=False).close()
