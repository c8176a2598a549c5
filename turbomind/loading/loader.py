"""Reads configs and packs weights: dtypes, fingerprint, slots of the core."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import turbomind._C as _C
from turbomind.errors import InvalidRequest, ModelError, NotFound
from turbomind.loading.checkpoint import DTYPES, Checkpoint
from turbomind.loading.digests import full_digest
from turbomind.loading.hub import resolve
from turbomind.models import Description, Family, Rows, family_of
from turbomind.models.config import read_json, token_id_list
from turbomind.tile_orders import tile_order

WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model from its configs, before its weights are read.

    Attributes:
        path: The model folder, or a config.json.
        description: The architecture.
        dtype: Format of the weights in memory.
        kv_dtype: Format of the KV cache.
        eos_token_ids: From generation_config.json, else from config.json, without ids outside the
            vocabulary.
        generation_defaults: generation_config.json as it is.
        unknown_fields: Fields of config.json that are ignored because no implementation is known
            to read them.
    """

    path: Path
    description: Description
    dtype: str
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    unknown_fields: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the config and tokenizer."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        slots = _family(self.description).slots(self.description)
        return sum(r.count * math.prod(r.shape[1:]) for _, rows in slots for r in rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in `dtype`, without padding."""
        return self.parameters * WEIGHT_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token over all layers, without padding."""
        values = sum(2 * layer.kv_heads * layer.head_dim for layer in self.description.layers)
        return values * KV_BYTES[self.kv_dtype]


def describe(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    rope_length: int | None = None,
    revision: str | None = None,
    weights: bool = True,
    gpu: bool = False,
) -> ModelInfo:
    """Reads the configs of a model.

    Args:
        model: A folder, a hub name or a `config.json`.
        dtype: Format of the weights in memory. "auto": the config's own; bfloat16 where it has
            none, and on a `gpu` in place of float32, which it cannot multiply.
        kv_dtype: Format of the KV cache. "auto": float32 for float32 weights, else bfloat16, also
            for float16 weights; on a `gpu` that of the weights.
        rope_length: Tokens that dynamic NTK rope scaling is computed for.
        revision: Branch, tag or commit of a hub name.
        weights: Downloads the weights of a hub name too.
        gpu: The model will run on a GPU.

    Raises:
        InvalidRequest: An argument is wrong.
        NotFound: There is no such model.
        ModelError: The config cannot be used.
    """
    path = resolve(model, revision, weights)
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        raise NotFound(f"{path} has no config.json")
    values = read_json(config_path)
    family = family_of(values)
    description = family.describe(values, rope_length)
    dtype = _weight_dtype(dtype, values, gpu)
    _check_choice("kv_dtype", kv_dtype, ("auto", *KV_BYTES))
    if kv_dtype == "auto":
        kv_dtype = dtype if gpu or dtype == "float32" else "bfloat16"
    generation: dict[str, Any] = {}
    if (config_path.parent / "generation_config.json").is_file():
        generation = read_json(config_path.parent / "generation_config.json")
    eos = token_id_list(generation, "eos_token_id", "generation_config.json")
    eos = eos or token_id_list(values, "eos_token_id", "config.json")
    return ModelInfo(
        path=path,
        description=description,
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos_token_ids=tuple(i for i in dict.fromkeys(eos) if 0 <= i < description.vocab),
        generation_defaults=generation,
        unknown_fields=family.unknown_fields,
    )


def float16_note(info: ModelInfo, isa: str) -> str:
    """Returns what another dtype would gain on a CPU; empty where nothing.

    Processors with products of bfloat16 (AVX512-BF16, AMX) have none of float16. On Zen 4 a prompt
    of 512 tokens of a 0.5B model is computed 1.6 times as fast in bfloat16.
    """
    if info.dtype != "float16" or isa not in ("avx512_bf16", "amx", "amx_emulated"):
        return ""
    gain = "about 1.6 times as fast" if isa == "avx512_bf16" else "several times faster"
    return (
        "float16 weights are multiplied as float32 on this processor: dtype 'bfloat16' computes "
        f"prompts {gain}, with 8 instead of 11 bits of each weight"
    )


def unknown_fields_note(info: ModelInfo) -> str:
    """Returns a sentence about fields of the config that are ignored."""
    names = ", ".join(info.unknown_fields)
    return f"{info.path}: config.json has fields that no known model reads, ignored: {names}"


def _check_choice(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise InvalidRequest(f"{name} is {value!r}, expected one of {', '.join(options)}")


def _weight_dtype(dtype: str, config: dict[str, Any], gpu: bool) -> str:
    _check_choice("dtype", dtype, ("auto", *WEIGHT_BYTES))
    if dtype != "auto":
        return dtype
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    own = config.get(name)
    if own is None:
        return "bfloat16"
    short = own.removeprefix("torch.") if isinstance(own, str) else own
    if short not in tuple(WEIGHT_BYTES):  # a tuple: the value may be unhashable
        raise ModelError(
            f"config.json: {name} is {own!r}, expected one of {', '.join(WEIGHT_BYTES)}"
        )
    return "bfloat16" if gpu and short == "float32" else str(short)


def _family(description: Description) -> Family:
    return family_of({"architectures": [description.architecture]})


def fingerprint(info: ModelInfo, weights: str) -> str:
    """Returns a SHA-256 (hex); models of equal fingerprints have interchangeable KV.

    It covers the core's config (rope tables included), the dtypes, and `weights`: the checkpoint's
    digest, of all its bytes or of samples, or the seed of dummy weights. The three kinds of
    `weights` never agree.
    """
    facts = {
        "model": dataclasses.asdict(info.description),
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "weights": weights,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load(
    info: ModelInfo,
    *,
    isa: str,
    threads: int,
    load_format: str = "auto",
    seed: int = 0,
    digests: Path | None = None,
    gpu: _C.GpuOptions | None = None,
) -> _C.Model:
    """Packs the weights. Peak memory is the packed weights and about 2 MiB of their sources.

    Args:
        info: The model.
        isa: Instruction set of the CPU kernels.
        threads: Threads that pack and compute.
        load_format: "auto", or "dummy": small reproducible weights from `seed`, without files.
        seed: Seed of dummy weights.
        digests: JSON file that caches digests (`turbomind.loading.digests`), so that the
            fingerprint covers every byte of the weight files. None: it covers samples.
        gpu: The GPU. None: the CPU.

    Raises:
        InvalidRequest: `load_format` is unknown.
        ModelError: A weight is missing, superfluous, misshapen or not finite, or a file changed
            meanwhile.
    """
    _check_choice("load_format", load_format, LOAD_FORMATS)
    if load_format == "dummy":
        core = info.description.to_core(
            info.dtype, info.kv_dtype, fingerprint(info, f"dummy {seed}")
        )
        builder = _C.DecoderBuilder(core, isa, threads, gpu, tile_order(isa))
        builder.fill_dummy(seed)
        return builder.finish(False)
    if not info.path.is_dir():
        raise ModelError(f"{info.path} is a file, expected a folder (or load_format 'dummy')")
    checkpoint = Checkpoint(info.path)
    slots = list(_family(info.description).slots(info.description))
    _check_unused(info, checkpoint, slots)
    if digests is None:
        weights = checkpoint.digest()
    else:
        weights = full_digest([(file.path, file.stat) for file in checkpoint.files], digests)
    core = info.description.to_core(info.dtype, info.kv_dtype, fingerprint(info, weights))
    builder = _C.DecoderBuilder(core, isa, threads, gpu, tile_order(isa))
    for i, (slot, rows) in enumerate(slots):
        for row in slots[i + 1][1] if i + 1 < len(slots) else []:  # the disk works while we pack
            file, tensor = checkpoint.find(row.tensor, row.shape)
            file.prefetch(tensor)
        _pack(builder, checkpoint, slot, rows)
    return builder.finish(True)


def _check_unused(
    info: ModelInfo, checkpoint: Checkpoint, slots: list[tuple[str, list[Rows]]]
) -> None:
    family = _family(info.description)
    used = {row.tensor for _, rows in slots for row in rows}
    for name, shape in {(row.tensor, row.shape) for _, rows in slots for row in rows}:
        checkpoint.find(name, shape)
    extra = sorted(
        name
        for name in checkpoint
        if name not in used and not family.ignored_tensor(name, info.description)
    )
    if extra:
        raise ModelError(
            f"{info.path}: {len(extra)} tensors that {info.description.architecture} has no use "
            f"for: {', '.join(extra[:8])}; expected none"
        )


def _pack(builder: _C.DecoderBuilder, checkpoint: Checkpoint, slot: str, rows: list[Rows]) -> None:
    segments = []
    for row in rows:
        file, tensor = checkpoint.find(row.tensor, row.shape)
        dtype, columns = DTYPES[tensor.dtype][0], math.prod(row.shape[1:])
        segments.append((file.source(tensor), dtype, row.begin, row.count, columns))
    builder.set(slot, segments)
