"""Memory while weights are loaded: the packed ones, and 64 MiB beside them, which is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import TINY
from safetensors.numpy import save_file

from turbomind import InvalidRequest, ModelError
from turbomind.config.memory_budget import PACKING, check_parts, loading_parts
from turbomind.loading.loader import describe, load

CPU_ONLY = pytest.mark.cpu_only("memory of a process on the CPU")
ROWS, HIDDEN = 65536, 512  # of an embedding and a head; numpy took up to 200 MB to decode one
MIB = 1 << 20

# Loads a model with so much more data than the process has when it begins.
PROGRAM = """
import resource, sys
import turbomind
from turbomind.loading.loader import describe, load
from turbomind.loading.quantize import read_quantize
path, room, load_format = sys.argv[1], int(sys.argv[2]), sys.argv[3]
quantize = read_quantize("int4", "int4", None) if load_format == "dummy" else None
info = describe(path, weights=load_format == "auto", quantize=quantize)
used = next(l for l in open("/proc/self/status") if l.startswith("VmData:"))
most = 1024 * int(used.split()[1]) + info.weight_bytes + room
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
try:
    load(info, isa="portable", threads=1, load_format=load_format)
except turbomind.Error as error:
    print(type(error).__name__, error)
else:
    print("loaded", info.weight_bytes)
"""


def blocks(kind: gguf.GGMLQuantizationType, rows: int) -> np.ndarray:
    """Returns random blocks [rows, bytes of a row] with finite scales."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    count = rows * HIDDEN // size
    found = np.random.default_rng(1).integers(0, 256, (count, width), np.uint8) & 0xBF
    return found.reshape(rows, -1)


def write_gguf(path: Path, name: str) -> Path:
    kind = gguf.GGMLQuantizationType[name]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1, "context_length": 512, "embedding_length": HIDDEN,
        "feed_forward_length": HIDDEN, "attention.head_count": 8, "attention.head_count_kv": 8,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = {"token_embd": ROWS, "output": ROWS, **{f"blk.0.{end}": HIDDEN for end in layer}}
    for tensor, rows in matrices.items():
        writer.add_tensor(f"{tensor}.weight", blocks(kind, rows), raw_dtype=kind)
    for tensor in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{tensor}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_awq(path: Path) -> Path:
    """Writes a folder whose feed-forward layer is as wide as a vocabulary."""
    path.mkdir()
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": ROWS, "vocab_size": 128}
    config = {**TINY, **sizes, "num_hidden_layers": 1, "quantization_config": quantization}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    config |= {"tie_word_embeddings": True, "torch_dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray] = {}
    rng, prefix = np.random.default_rng(1), "model.layers.0"
    shapes = {f"self_attn.{end}_proj": (HIDDEN, HIDDEN) for end in "qkvo"}
    shapes |= {"mlp.gate_proj": (ROWS, HIDDEN), "mlp.up_proj": (ROWS, HIDDEN)}
    for module, (outputs, inputs) in {**shapes, "mlp.down_proj": (HIDDEN, ROWS)}.items():
        codes, groups = (inputs, outputs // 8), inputs // 128
        words = rng.integers(-(2**31), 2**31, codes, np.int64).astype(np.int32)
        tensors[f"{prefix}.{module}.qweight"] = words
        tensors[f"{prefix}.{module}.qzeros"] = words[:groups].copy()
        tensors[f"{prefix}.{module}.scales"] = np.full((groups, outputs), 0.01, np.float16)
    for norm in (f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm", "model.norm"):
        tensors[f"{norm}.weight"] = np.ones(HIDDEN, np.float16)
    tensors["model.embed_tokens.weight"] = np.full((128, HIDDEN), 0.01, np.float16)
    save_file(tensors, path / "model.safetensors")
    return path


def write_dummy(path: Path) -> Path:
    """Writes a config whose largest matrix has 100 million weights."""
    path.mkdir()
    sizes = {"hidden_size": HIDDEN, "vocab_size": 200_000, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps({**TINY, **sizes, "torch_dtype": "bfloat16"}))
    return path


MODELS: dict[str, Callable[[Path], Path]] = {
    "Q8_0": lambda path: write_gguf(path, "Q8_0"),
    "Q6_K": lambda path: write_gguf(path, "Q6_K"),
    "awq": write_awq,
    "dummy": write_dummy,
}


def load_with(model: Path, room: int, load_format: str) -> str:
    """Loads a model in a process of its own, and returns what it says."""
    command = [sys.executable, "-c", PROGRAM, str(model), str(room), load_format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@CPU_ONLY
@pytest.mark.skipif(sys.platform != "linux", reason="limits of data are Linux's")
@pytest.mark.parametrize("name", MODELS)
def test_loading_takes_what_the_check_counts(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path / "model")
    load_format = "dummy" if name == "dummy" else "auto"
    assert load_with(model, PACKING, load_format).startswith("loaded")


@CPU_ONLY
@pytest.mark.skipif(sys.platform != "linux", reason="limits of data are Linux's")
def test_a_limit_that_is_met_while_loading_is_a_named_error(tmp_path: Path) -> None:
    said = load_with(write_gguf(tmp_path / "model.gguf", "Q8_0"), -20 * MIB, "auto")
    assert said.startswith("ModelError the weights need")


def test_memory_that_runs_out_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_gguf(tmp_path / "model.gguf", "Q8_0")
    info = describe(model)

    def fails(*_: Any) -> None:
        raise MemoryError("Unable to allocate 5 GiB")

    monkeypatch.setattr("turbomind.quant.sources.Sources.pack", fails)
    with pytest.raises(ModelError, match="may use ran out while it was read: Unable to"):
        load(info, isa="portable", threads=1)


def test_an_engine_whose_loading_does_not_fit_is_refused(tmp_path: Path) -> None:
    info = describe(write_gguf(tmp_path / "model.gguf", "Q8_0"))
    parts = loading_parts(info)
    needed = sum(part.bytes for part in parts)
    assert info.weight_bytes + PACKING <= needed <= 1.01 * info.weight_bytes + PACKING
    check_parts(parts, needed)
    with pytest.raises(InvalidRequest, match="loading 64 MiB; expected at most"):
        check_parts(parts, needed - 1)
