"""Reads configs and packs weights: dtypes, fingerprint, slots of the core."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.gguf.file import GgufFile
from turbomind.loading.digests import full_digest
from turbomind.loading.hub import resolve
from turbomind.loading.model_source import ModelSource, checked_sources, source_of
from turbomind.loading.quantize import Quantize, format_names
from turbomind.loading.tile_orders import tile_order
from turbomind.models import Description, Family, Quantization
from turbomind.params import wrong
from turbomind.quant.sources import Sources
from turbomind.shown import shown_name

WEIGHT_DTYPES = ("bfloat16", "float16", "float32")
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model from its configs, before its weights are read.

    Attributes:
        path: The model folder, a GGUF file, or a config.json.
        family: The reader of the config, which names the tensors.
        description: The architecture.
        dtype: Format in memory of the weights that `formats` does not have.
        kv_dtype: Format of the KV cache.
        eos_token_ids: From generation_config.json and config.json, or from the metadata of a GGUF
            file; without ids outside the vocabulary. A chat engine adds those of the tokenizer and
            of the chat template.
        generation_defaults: generation_config.json as it is, or the values of a GGUF file under
            its names.
        rope_type: The RoPE scaling that the config names; "default" for none.
        unknown_fields: Fields of config.json that are ignored because the reference implementation
            of the model does not read them.
        encoders: Parts of the model that are not loaded: "vision", "audio".
        formats: Formats of quantized matrices, by slot of the core.
        gpu: The model will run on a GPU.
        gguf: The GGUF file that `path` is. No file beside it is read.
        quantization: What the checkpoint says about its quantized weights; None for others.
        tp: The ranks that the model is cut over.
        head_note: What the user should know of the head, "" for nothing.
        draft_layers: Layers of a GGUF file that only draft tokens and are not loaded.
        sources: The open weight files, checked, which `load` reads; None where they were not asked
            for, are not there, or are loaded already.
        source: The files that this comes from; None once the weights are loaded.
    """

    path: Path
    family: Family
    description: Description
    dtype: str
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    rope_type: str = "default"
    unknown_fields: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False
    gguf: GgufFile | None = field(default=None, compare=False)
    quantization: Quantization | None = None
    tp: int = 1
    head_note: str = ""
    draft_layers: int = 0
    sources: Sources | None = field(default=None, compare=False, repr=False)
    source: ModelSource | None = field(default=None, compare=False, repr=False)

    def to_core(self, fingerprint: str = "") -> _C.ModelConfig:
        """Converts the description to the core's struct."""
        core = self.description.to_core(self.dtype, self.kv_dtype, fingerprint)
        core.slot_formats = dict(self.formats)
        return core

    @property
    def slots(self) -> list[_C.Slot]:
        """The places of the weights, with their formats and sizes."""
        return _C.weight_slots(self.to_core(), self.gpu and not self.formats)

    @property
    def parameters(self) -> int:
        """Number of weights; those of a tied head, and of K that is V too, are counted once."""
        slots = self.family.slots(self.description)
        unique = {row for _, rows in slots for row in rows}
        return sum(row.count * row.columns for row in unique)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights of all ranks; those that they share count once."""
        shared, ranks = self.memory
        return shared + sum(weights for weights, _ in ranks)

    @property
    def memory(self) -> tuple[int, list[tuple[int, list[int]]]]:
        """Bytes by rank: (weights that ranks share, [(weights, [page of each cache group])])."""
        return _C.plan_memory(self.to_core(), self.gpu and not self.formats, self.tp)

    @property
    def rank_weight_bytes(self) -> list[int]:
        """Bytes of the packed weights of each rank where ranks share none, as on GPUs."""
        shared, ranks = self.memory
        return [shared + weights for weights, _ in ranks]

    def step_weight_bytes(self, tokens: int = 1) -> int:
        """Returns the bytes of the weights that a step reads.

        Of experts they are those that `tokens` tokens use on average, if every expert is as likely
        as any other.
        """
        lookups = {"per_layer_embed"}  # only rows of them are read
        if not self.description.tied_head:
            lookups.add("embed")
        read = (
            slot.bytes * self._share_used(slot.name, tokens)
            for slot in self.slots
            if slot.linear and slot.name not in lookups
        )
        return round(sum(read))

    def _share_used(self, slot: str, tokens: int) -> float:
        found = re.match(r"layers\.(\d+)\.experts\.", slot)
        experts = self.description.layers[int(found[1])].experts if found else None
        return 1.0 if experts is None else 1 - (1 - experts.top_k / experts.count) ** tokens

    @property
    def weights_text(self) -> str:
        """The formats of the matrices, such as "bfloat16" or "int8 and bfloat16"."""
        return format_names(self.slots)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV of one token over all layers, without padding."""
        own = [layer for layer in self.description.layers if layer.kv_layer < 0]
        values = sum(2 * layer.kv_heads * layer.head_dim for layer in own)
        return values * KV_BYTES[self.kv_dtype]


@contextlib.contextmanager
def _enough_memory(path: Path) -> Iterator[None]:
    """Raises ModelError in place of MemoryError, where a limit of the process is met."""
    try:
        yield
    except MemoryError as error:
        raise ModelError(
            f"{path}: the memory that this process may use ran out while it was read"
            f"{f': {error}' if str(error) else ''}"
        ) from error


def describe(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    rope_length: int | None = None,
    revision: str | None = None,
    weights: bool = True,
    gpu: bool = False,
    quantize: Quantize | None = None,
    tp: int = 1,
) -> ModelInfo:
    """Reads the configs of a model.

    Args:
        model: A folder, a hub name, a GGUF file or a `config.json`.
        dtype: Format of the weights in memory. "auto": the config's own; bfloat16 where it has
            none, and on a `gpu` in place of float32, which it cannot multiply.
        kv_dtype: Format of the KV cache. "auto": float32 for float32 weights, else bfloat16, also
            for float16 weights; on a `gpu` that of the weights.
        rope_length: Tokens that a rope scaling which depends on a length is computed for.
        revision: Branch, tag or commit of a hub name.
        weights: Downloads the weights of a hub name too, and checks the names, shapes and types of
            all tensors. Without it weights that are there count only where their types matter.
        gpu: The model will run on a GPU.
        quantize: Formats that matrices are quantized to while they are loaded.
        tp: Ranks that the model is cut over, on the CPU.

    Raises:
        InvalidRequest: An argument is wrong, or the model cannot be cut over so many ranks.
        NotFound: There is no such model.
        ModelError: The config cannot be used.
    """
    path = resolve(model, revision, weights)
    with _enough_memory(path):
        return _describe(path, dtype, kv_dtype, rope_length, weights, gpu, quantize, tp)


def _describe(
    path: Path,
    dtype: str,
    kv_dtype: str,
    rope_length: int | None,
    weights: bool,
    gpu: bool,
    quantize: Quantize | None,
    tp: int,
) -> ModelInfo:
    source = source_of(path, rope_length)
    source.open(weights)
    head_note = source.use_stored_head()
    dtype = _weight_dtype(dtype, source.values, gpu)
    _check_choice("kv_dtype", kv_dtype, ("auto", *KV_BYTES))
    if kv_dtype == "auto":
        kv_dtype = dtype if gpu or dtype == "float32" else "bfloat16"
    sources = checked_sources(source) if weights and source.files is not None else None
    formats = source.formats(dtype)
    if quantize is not None:
        chosen = quantize.formats(source.description.to_core(dtype, kv_dtype, ""))
        _check_quantize(quantize, chosen, formats, path)
        formats |= chosen
    scaling = source.values.get("rope_scaling") or source.values.get("rope_parameters") or {}
    info = ModelInfo(
        path=path,
        family=source.family,
        description=source.description,
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos_token_ids=tuple(
            i for i in dict.fromkeys(source.eos) if 0 <= i < source.description.vocab
        ),
        generation_defaults=source.generation,
        rope_type=str(scaling.get("rope_type") or scaling.get("type") or "default"),
        unknown_fields=source.family.unknown_fields,
        encoders=source.encoders,
        formats=formats,
        gpu=gpu,
        gguf=source.gguf,
        quantization=source.quantization,
        tp=tp,
        head_note=head_note,
        draft_layers=source.draft_layers,
        sources=sources,
        source=source,
    )
    if tp != 1:
        _C.plan_cache(info.to_core(), tp, gpu and not formats)  # raises if it cannot be cut
    return info


def _check_quantize(
    quantize: Quantize, chosen: Mapping[str, str], stored: Mapping[str, str], path: Path
) -> None:
    """Raises InvalidRequest where matrices that are codes would be quantized again."""
    if quantize.method is None and not stored:
        raise wrong("head", quantize.head, "None without quantize")
    if quantize.method is not None and stored:
        raise wrong("quantize", quantize.method, f"None: {path} has quantized weights")
    if chosen.keys() & stored.keys():
        kind = stored[min(chosen.keys() & stored.keys())]
        raise wrong("head", quantize.head, f"None: {path} has it quantized as {kind}")


def float16_note(info: ModelInfo, isa: str) -> str:
    """Returns what another dtype would gain on a CPU; empty where nothing.

    Processors with products of bfloat16 (AVX512-BF16, AMX) have none of float16. On Zen 4 a prompt
    of 512 tokens of a 0.5B model is computed 1.6 times as fast in bfloat16.
    """
    if info.dtype != "float16" or info.formats or isa not in ("avx512_bf16", "amx", "amx_emulated"):
        return ""
    gain = "about 1.6 times as fast" if isa == "avx512_bf16" else "several times faster"
    return (
        "float16 weights are multiplied as float32 on this processor: dtype 'bfloat16' computes "
        f"prompts {gain}, with 8 instead of 11 bits of each weight"
    )


def unknown_fields_note(info: ModelInfo) -> str:
    """Returns a sentence about fields of the config that are ignored."""
    names = ", ".join(map(shown_name, info.unknown_fields))
    where = "" if info.gguf else ": config.json"
    reader = info.description.architecture
    return f"{info.path}{where} has fields that {reader} does not read, ignored: {names}"


def check_load_format(load_format: str) -> None:
    """Raises InvalidRequest for an unknown `load_format`."""
    _check_choice("load_format", load_format, LOAD_FORMATS)


def _check_choice(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        raise wrong(name, value, f"one of {', '.join(options)}")


def _weight_dtype(dtype: str, config: Mapping[str, Any], gpu: bool) -> str:
    _check_choice("dtype", dtype, ("auto", *WEIGHT_DTYPES))
    if dtype != "auto":
        return dtype
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    own = config.get(name)
    if own is None:
        return "bfloat16"
    short = own.removeprefix("torch.") if isinstance(own, str) else own
    if short not in WEIGHT_DTYPES:
        raise ModelError(
            f"config.json: {name} is {own!r}, expected one of {', '.join(WEIGHT_DTYPES)}"
        )
    return "bfloat16" if gpu and short == "float32" else str(short)


def fingerprint(info: ModelInfo, weights: str) -> str:
    """Returns a SHA-256 (hex); models of equal fingerprints have interchangeable KV.

    It covers the core's config (rope tables included), the dtypes, the formats of quantized
    matrices, and `weights`: the checkpoint's digest, of all its bytes or of samples, or the seed of
    dummy weights. The three kinds of `weights` never agree.
    """
    facts = {
        "model": info.description.facts(),
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "weights": weights,
    }
    if info.formats:
        facts["formats"] = dict(info.formats)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load(
    info: ModelInfo,
    *,
    isa: str,
    threads: int,
    load_format: str = "auto",
    seed: int = 0,
    digests: Path | None = None,
    gpus: Sequence[_C.GpuOptions] = (),
) -> _C.Model:
    """Packs the weights. Peak memory is the packed weights and about 10 MiB of their sources, or
    the matrix of an expert where those are transposed or widened.

    Args:
        info: The model.
        isa: Instruction set of the CPU kernels.
        threads: Threads that pack and compute.
        load_format: "auto", or "dummy": small reproducible weights from `seed`, without files.
        seed: Seed of dummy weights.
        digests: JSON file that caches digests (`turbomind.loading.digests`), so that the
            fingerprint covers every byte of the weight files. None: it covers samples.
        gpus: The GPU of each rank. None of them: the CPU.

    Raises:
        InvalidRequest: `load_format` is unknown.
        ModelError: A weight is missing, superfluous, misshapen or not finite, or a file changed
            meanwhile.
    """
    check_load_format(load_format)
    if load_format == "dummy":
        core = info.to_core(fingerprint(info, f"dummy {seed}"))
        builder = _C.DecoderBuilder(core, isa, threads, gpus, tile_order(isa), info.tp)
        builder.fill_dummy(seed)
        return builder.finish(False)
    with _enough_memory(info.path):
        return _load_files(info, isa, threads, digests, gpus)


def _load_files(
    info: ModelInfo, isa: str, threads: int, digests: Path | None, gpus: Sequence[_C.GpuOptions]
) -> _C.Model:
    assert info.source is not None, "an engine's description has no files any more"
    info.source.require()
    sources = info.sources or checked_sources(info.source)
    checkpoint = sources.checkpoint
    if digests is None:
        weights = checkpoint.digest()
    else:
        weights = full_digest([(file.path, file.stat) for file in checkpoint.files], digests)
    rows = (row for _, each in sources.slots for row in each)
    core = info.to_core(fingerprint(info, weights + sources.scheme.correction(rows)))
    builder = _C.DecoderBuilder(core, isa, threads, gpus, tile_order(isa), info.tp)
    sources.pack(builder)
    return builder.finish(True)
