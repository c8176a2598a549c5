#!/usr/bin/env python3
"""Writes random-weight checkpoints of the compared shapes and converts them for the peers.

    python benchmarks/make_models.py [MODEL ...]

Needs numpy, and for GGUF and OpenVINO the environments that install_peers.py made (a missing one is
skipped with a message). Existing files are left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from install_peers import DEFAULT_DIR
from shapes import BF16_BYTES, SHAPES, Shape

WEIGHT_SCALE = 0.02


def write_checkpoint(shape: Shape, folder: Path) -> None:
    """Writes a model folder: config.json, model.safetensors in bf16, a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", shape.config())
    generation = {key: shape.hf[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in shape.tensors().items():
        end = offset + BF16_BYTES * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    partial = folder / "model.safetensors.part"
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in shape.tensors().items():
            if "norm" in name:
                values = np.ones(size, np.float32)
            else:
                values = rng.standard_normal(size, np.float32) * np.float32(WEIGHT_SCALE)
            # The upper half of a float32 is a bfloat16; random weights need no rounding.
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).data)
    partial.rename(folder / "model.safetensors")


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of 256 byte tokens and an end token, for runtimes that require one."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    byte_level: dict[str, Any] = {"type": "ByteLevel", "use_regex": True}
    byte_level |= {"add_prefix_space": False, "trim_offsets": True}
    end: dict[str, Any] = {"id": 256, "content": "<end>", "special": True, "single_word": False}
    end |= {"lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(256)} | {"<end>": 256},
            "merges": [],
        },
    }
    write_json(folder / "tokenizer.json", tokenizer)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    write_json(folder / "tokenizer_config.json", names | {"bos_token": "<end>"})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def convert(peer: Path, target: Path, *command: str | Path) -> None:
    """Runs a conversion in a peer's environment unless its target exists.

    The last argument of the command is a temporary name, so that `target` is complete or absent.
    """
    if target.exists():
        print(f"{target}: exists")
    elif not (peer / "installed").exists():
        print(f"{target}: skipped, {peer.name} is not installed")
    else:
        print(f"{target}: writing", flush=True)
        paths = os.pathsep.join((str(peer / "venv" / "bin"), os.environ["PATH"]))
        environment = {**os.environ, "PATH": paths, "HF_HUB_OFFLINE": "1"}
        partial = target.with_name(target.name + ".part")
        if partial.is_dir():
            shutil.rmtree(partial)
        whole = [*map(str, command), str(partial)]
        subprocess.run(whole, check=True, env=environment)
        partial.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SHAPES)}; all")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"default: {DEFAULT_DIR}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - SHAPES.keys())
    if unknown:
        parser.error(f"unknown model {', '.join(unknown)}; expected some of {', '.join(SHAPES)}")
    root = arguments.dir.resolve()
    failures = 0
    for name in arguments.models or SHAPES:
        folder = root / "models" / name
        if not (folder / "model.safetensors").exists():
            print(f"{folder}: writing", flush=True)
            write_checkpoint(SHAPES[name], folder)
        python = root / "llama_cpp" / "venv" / "bin" / "python"
        script = Path(__file__).resolve().parent / "peers" / "to_gguf.py"
        exporter = root / "openvino" / "venv" / "bin" / "optimum-cli"
        export: list[str | Path] = [exporter, "export", "openvino", "--model", folder]
        export += ["--weight-format", "fp16", "--task", "text-generation-with-past"]
        jobs: list[tuple[str, str, list[str | Path]]] = [
            ("llama_cpp", "model-bf16.gguf", [python, script, folder]),
            ("openvino", "openvino", export),
        ]
        quantizer = root / "llama_cpp" / "build" / "bin" / "llama-quantize"
        source = folder / "model-bf16.gguf"
        for weights in ("q8_0", "q4_0"):  # the type follows the target, which convert() puts last
            script_text = f'exec "$0" "$1" "$2" {weights}'
            quantize: list[str | Path] = ["sh", "-c", script_text, quantizer, source]
            jobs.append(("llama_cpp", f"model-{weights}.gguf", quantize))
        for peer, target, command in jobs:
            try:
                convert(root / peer, folder / target, *command)
            except (OSError, subprocess.CalledProcessError) as error:
                failures += 1
                print(f"{folder / target}: FAILED: {error}", file=sys.stderr)
    return failures


if __name__ == "__main__":
    sys.exit(main())
