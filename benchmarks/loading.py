"""Loads files of codes in the shape of Qwen3-8B and shows how fast, and in how much memory.

Codes are random, which loading does not notice. With all 36 layers a file of Q4_K_M has 5 GB; by
default the files have a few layers. GGUF files have the whole embedding and head, which are the
largest matrices. Folders have float16 ones of few rows, so that the figure is that of their codes.

    python benchmarks/loading.py                          # a table of all formats, three minutes
    python benchmarks/loading.py --layers 36 --only Q4_K_M
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32, 8, 128
VOCAB, FOLDER_VOCAB = 151936, 4096
GROUP = 128
SCALE = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
# Bytes of a block at which a float16 scale or minimum begins.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
FORMATS = ("Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q4_K_M", "awq", "gptq", "pack-quantized")
MATRICES = {
    "self_attn.q_proj": ("attn_q", HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": ("ffn_gate", INNER, HIDDEN),
    "mlp.up_proj": ("ffn_up", INNER, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, INNER),
}


def config(layers: int, quantization: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": FOLDER_VOCAB,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "torch_dtype": "float16",
        "quantization_config": quantization,
    }  # fmt: skip


def blocks(rng: np.random.Generator, name: str, rows: int, columns: int) -> np.ndarray:
    """Returns random blocks [rows, bytes of a row] of a type."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    found = rng.integers(0, 256, (rows * columns // size, width), dtype=np.uint8)
    for at in SCALES[name]:
        found[:, at : at + 2] = SCALE
    return found.reshape(rows, -1)


def gguf_type(name: str, tensor: str, layer: int) -> str:
    """Returns the type of a tensor in a file of a type; Q4_K_M has larger ones for some."""
    if name != "Q4_K_M":
        return name
    large = tensor == "output" or (tensor in ("attn_v", "ffn_down") and layer % 2 == 0)
    return "Q6_K" if large else "Q4_K"


def write_gguf(path: Path, name: str, layers: int) -> None:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3", use_temp_file=True)
    for key, value in {
        "block_count": layers, "context_length": 40960, "embedding_length": HIDDEN,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }.items():  # fmt: skip
        writer.add_uint32(f"qwen3.{key}", value)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)

    def add(tensor: str, rows: int, columns: int, layer: int = -1) -> None:
        kind = gguf_type(name, tensor, layer)
        full = f"blk.{layer}.{tensor}.weight" if layer >= 0 else f"{tensor}.weight"
        data = blocks(rng, kind, rows, columns)
        writer.add_tensor(full, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd", VOCAB, HIDDEN)
    add("output", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(layers):
        for tensor, rows, columns in MATRICES.values():
            add(tensor, rows, columns, layer)
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
        for norm, width in (norms | {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}).items():
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the type and shape of each tensor of a module, by the end of its name."""
    groups = columns // GROUP
    if name == "pack-quantized":
        return {
            "weight_packed": ("I32", (rows, columns // 8)),
            "weight_scale": ("F16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
            "weight_zero_point": ("I32", (rows // 8, groups)),
        }
    codes = (columns, rows // 8) if name == "awq" else (columns // 8, rows)
    return {
        "qweight": ("I32", codes),
        "qzeros": ("I32", (groups, rows // 8)),
        "scales": ("F16", (groups, rows)),
    }


def quantization(name: str) -> dict[str, Any]:
    if name == "pack-quantized":
        weights = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {
            "quant_method": "compressed-tensors", "format": name, "config_groups": groups,
            "ignore": ["lm_head"],
        }  # fmt: skip
    own = {"zero_point": True, "version": "gemm"} if name == "awq" else {"sym": False}
    return {"quant_method": name, "bits": 4, "group_size": GROUP, **own}


def tensors(name: str, layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for module, (_, rows, columns) in MATRICES.items():
            for end, (dtype, shape) in packed(name, rows, columns).items():
                yield f"{prefix}.{module}.{end}", dtype, shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", "F16", (HIDDEN,)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{norm}.weight", "F16", (HEAD_DIM,)
    yield "model.norm.weight", "F16", (HIDDEN,)
    yield "model.embed_tokens.weight", "F16", (FOLDER_VOCAB, HIDDEN)
    yield "lm_head.weight", "F16", (FOLDER_VOCAB, HIDDEN)


def write_folder(folder: Path, name: str, layers: int) -> None:
    """Writes a folder whose float16 tensors are 0.01 and whose words are random."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers, quantization(name))))
    rng, sizes = np.random.default_rng(1), {"F16": 2, "I32": 4, "I64": 8}
    header: dict[str, Any] = {}
    begin = 0
    for tensor, dtype, shape in tensors(name, layers):
        end = begin + int(np.prod(shape)) * sizes[dtype]
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, dtype, shape in tensors(name, layers):
            if dtype == "F16":
                np.full(shape, 0.01, np.float16).tofile(file)
            elif dtype == "I64":
                rows, columns = MATRICES[tensor.split(".", 3)[3].rsplit(".", 1)[0]][1:]
                np.array([rows, columns]).tofile(file)
            else:
                rng.integers(0, 2**32, shape, dtype=np.uint32).tofile(file)


def measure(model: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "lmchat.cli", "bench", "load", str(model), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--only", choices=FORMATS, action="append")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    print("| format | file, MB | s | MB/s per core | packed, MB | peak above packed, MiB |")
    print("|---|---|---|---|---|---|")
    for name in chosen.only or FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / ("model.gguf" if name[0] == "Q" else "model")
            write = write_gguf if name[0] == "Q" else write_folder
            write(model, name, chosen.layers)
            found = measure(model, ["--threads", str(chosen.threads)])
        print(
            f"| {name} | {found['file_bytes'] / 1e6:.0f} | {found['seconds']:.2f} "
            f"| {found['bytes_per_cpu_second'] / 1e6:.0f} | {found['packed_bytes'] / 1e6:.0f} "
            f"| {(found['peak_bytes'] - found['packed_bytes']) / 2**20:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
