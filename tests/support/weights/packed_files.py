"""Writes quantized checkpoints with random codes, and the values of their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from turbomind.models.quantization import Quantization, quantization_of

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, np.ndarray]


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns codes [rows, n] in words, int32 [rows, n * bits / 32]. A code of -1 borrows from the
    next one."""
    count = 32 // bits
    groups = codes.reshape(len(codes), -1, count).astype(np.uint64)
    words = np.zeros(groups.shape[:2], np.uint64)
    for i in range(count):
        place = i if order is None else order[i]
        words += groups[:, :, place] << np.uint64(bits * i)  # of -1, all bits from here on
    return words.astype(np.uint32).view(np.int32)


def awq(
    rng: np.random.Generator, weight: np.ndarray, group: int, sym: bool = False
) -> tuple[Tensors, np.ndarray]:
    """Returns the tensors of a module and the values of its weight, float32 [out, in]."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = np.full((groups, outputs), 8) if sym else rng.integers(5, 11, (groups, outputs))
    scales = (rng.uniform(0.5, 1.5, (groups, outputs)) * weight.std() / 4.6).astype(np.float16)
    index = np.arange(inputs) // group
    values = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    tensors = {
        "qweight": pack(codes, 4, AWQ_ORDER),
        "qzeros": pack(zeros, 4, AWQ_ORDER),
        "scales": scales,
    }
    return tensors, np.ascontiguousarray(values.T)


def gptq(
    rng: np.random.Generator,
    weight: np.ndarray,
    *,
    bits: int,
    group: int,
    sym: bool = True,
    stored: int = -1,
    order: np.ndarray | None = None,
    lowest: int | None = None,
) -> tuple[Tensors, np.ndarray]:
    """Returns the tensors of a module and the values of its weight, float32 [out, in].

    Args:
        rng: The dice.
        weight: A weight of the wanted shape and spread.
        bits: Of a code.
        group: Columns of a group; -1: all.
        sym: The zero point is in the middle of the range.
        stored: What is added to a zero point that is stored.
        order: The columns in the order of their groups, [in]; None: as they are.
        lowest: A zero point that is as likely as the others together.
    """
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    groups, middle = -(-inputs // size), 1 << (bits - 1)
    codes = rng.integers(0, 2 * middle, (inputs, outputs))
    zeros = np.full((groups, outputs), middle)
    if not sym:
        zeros = rng.integers(middle - 3, middle + 3, (groups, outputs))
        if lowest is not None:
            zeros = np.where(rng.random(zeros.shape) < 0.5, lowest, zeros)
    spread = weight.std() / (0.58 * middle)
    scales = (rng.uniform(0.5, 1.5, (groups, outputs)) * spread).astype(np.float16)
    index = np.arange(inputs) // size
    if order is not None:
        index[order] = np.arange(inputs) // size
    values = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    tensors = {
        "qweight": np.ascontiguousarray(pack(np.ascontiguousarray(codes.T), bits).T),
        "qzeros": pack(zeros + stored, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    return tensors, np.ascontiguousarray(values.T)


def compressed(
    weight: np.ndarray,
    layout: str,
    *,
    scale_type: str = "bfloat16",
    **arguments: Any,
) -> tuple[Tensors, np.ndarray]:
    """Returns the tensors that compressed-tensors makes of a weight, and the values it reads, which
    are exact: of float32 scales.

    Args:
        weight: The weight, float32 [out, in].
        layout: Such as "pack-quantized".
        scale_type: Of the scales.
        arguments: The field `weights` of the config.
    """
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry(layout)
    outputs, inputs = weight.shape
    group, bits = arguments.get("group_size") or inputs, arguments["num_bits"]
    dice = torch.Generator().manual_seed(weight.size)
    shape = (outputs, inputs // group)
    scales = 0.5 + torch.rand(shape, generator=dice)
    scales = (scales * weight.std() * 4 / (1 << bits)).to(getattr(torch, scale_type))
    state = {"weight": torch.from_numpy(weight), "weight_scale": scales}
    if not arguments.get("symmetric", True):
        zeros = torch.randint(-3, 4, shape, generator=dice)
        state["weight_zero_point"] = zeros.to(torch.int8)
    tensors = compressor.compress(state, scheme)
    values = compressor.decompress({**tensors, "weight_scale": scales.float()}, scheme)["weight"]
    parts = {name: each if "scale" in name else each.numpy() for name, each in tensors.items()}
    return parts, values.numpy()


def column_orders(folder: Path) -> dict[str, Any]:
    """Returns the columns in the order of their groups, of each module of a file that has it."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    return {
        name.rpartition(".")[0]: torch.argsort(each, stable=True)
        for name, each in tensors.items()
        if name.endswith("g_idx")
    }


def quantization(config: dict[str, Any]) -> Quantization:
    """Returns what a config.json with that quantization_config says."""
    found = quantization_of({"quantization_config": config})
    assert found is not None
    return found


def drop(name: str) -> Callable[[Tensors], None]:
    """Returns what leaves a tensor out."""

    def more(tensors: Tensors) -> None:
        del tensors[name]

    return more


def change(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    """Returns what replaces a tensor by another."""
    return lambda tensors: tensors.update({name: np.ascontiguousarray(value(tensors[name]))})


def one_nan(scales: np.ndarray) -> np.ndarray:
    """Makes one of the scales no number."""
    scales[0, 0] = np.nan
    return scales


def write(
    model: Any,
    folder: Path,
    config: dict[str, Any],
    make: Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]],
    more: Callable[[Tensors], None] = lambda tensors: None,
) -> Path:
    """Writes a checkpoint of a reference model, whose weights become those of the codes.

    Args:
        model: The model of transformers.
        folder: The folder.
        config: The field quantization_config.
        make: Returns the tensors and values of a module by its name and weight.
        more: Changes the tensors before they are written.
    """
    import torch
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    tensors = {name: each.numpy().copy() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parts, values = make(name, tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{end}": part for end, part in parts.items()}
            with torch.no_grad():
                module.weight.copy_(torch.from_numpy(values))
    more(tensors)
    stored = {name: torch.as_tensor(each) for name, each in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    return folder
