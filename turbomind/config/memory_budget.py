"""The memory that an engine on the CPU will need, compared with what the process may use.

The system gives out more memory than it has and ends a process that touches too much of it, so an
engine that does not fit is refused before its weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import turbomind._C as _C
from turbomind.config.defaults import CacheSize, pool_bytes
from turbomind.config.device import gpu_note, ranks_by_gpu
from turbomind.errors import InvalidRequest
from turbomind.loading.loader import ModelInfo
from turbomind.machine import available_memory
from turbomind.models import Description, Layer

_PADDING = 1.01  # packed weights and their sources
_FIXED = 48 << 20  # thread stacks and tables
PACKING = 64 << 20  # what packing needs beside the packed weights: pieces of sources, panels
_LOGITS = 128 << 20  # of a piece of the result of a logits request


@dataclass(frozen=True)
class Part:
    """A part of the memory, and the option that makes it smaller; empty for none."""

    name: str
    bytes: int
    option: str = ""


def check_memory(
    info: ModelInfo,
    parts: list[Part],
    available: int,
    whose: str = "that this process may use now",
) -> None:
    """Refuses an engine on the CPU that needs more memory than this process may use.

    Args:
        info: The model, not loaded yet.
        parts: The parts of the memory once the cache is full.
        available: The bytes.
        whose: Describes them in the message.

    Raises:
        InvalidRequest: It does not fit; the message lists the parts and what to lower.
    """
    check_parts(parts, available, whose)
    check_parts(loading_parts(info), available, whose)


def kept_bytes(info: ModelInfo, options: _C.EngineOptions, isa: str, threads: int) -> int:
    """Returns the bytes that steps and the host tier take on the CPU beside weights and KV."""
    attention = attention_bytes(info.description, isa, max(threads, info.tp))
    return step_bytes(info.description, options, info.tp) + attention + _FIXED + options.host_bytes


def _shares(
    info: ModelInfo, options: _C.EngineOptions, cache: CacheSize, gpus: Sequence[_C.GpuOptions]
) -> Iterator[tuple[_C.GpuOptions, int, int, int]]:
    """Yields each GPU with its free bytes, and those of its weights and its part of the cache."""
    weights_of = info.rank_weight_bytes
    pages = pool_bytes(cache_groups(info), options) if options.cache_pages else 0
    for gpu, ranks in ranks_by_gpu(gpus):
        free, weights = _C.gpu_free_bytes(gpu), sum(weights_of[rank] for rank in ranks)
        kv = pages or cache.of(max(0, free - weights) * len(gpus) // len(ranks))
        yield gpu, free, weights, kv * len(ranks) // len(gpus)


def gpu_parts(
    info: ModelInfo, options: _C.EngineOptions, cache: CacheSize, gpus: Sequence[_C.GpuOptions]
) -> list[Part]:
    """Returns the parts of the memory of all GPUs that an engine takes, but for its steps."""
    shares = list(_shares(info, options, cache, gpus))
    return [
        Part(f"weights as {info.weights_text}", sum(weights for _, _, weights, _ in shares)),
        Part("KV cache", sum(kv for _, _, _, kv in shares), "cache_memory"),
    ]


def check_gpu_memory(
    info: ModelInfo, options: _C.EngineOptions, cache: CacheSize, gpus: Sequence[_C.GpuOptions]
) -> None:
    """Refuses an engine whose weights and KV cache do not fit the GPUs, before weights are read.

    Args:
        info: The model, not loaded yet.
        options: The engine's options.
        cache: The size of the KV cache.
        gpus: The GPU of each rank, which has its weights and an equal part of the KV cache.

    Raises:
        InvalidRequest: It does not fit; the message has the bytes needed and those free.
    """
    for gpu, free, weights, kv in _shares(info, options, cache, gpus):
        if weights + kv > free:
            raise InvalidRequest(
                f"the weights{gpu_note(gpu, gpus)} need {weights} bytes as {info.weights_text} and "
                f"the KV cache {kv} (cache_memory, cache_pages), expected at most {free} together, "
                "the device's free memory"
            )


def piece_rows(vocab: int) -> int:
    """Returns how many rows of logits are computed at a time: whole pages of at most 128 MiB."""
    page = _C.PAGE_TOKENS
    return max(page, _LOGITS // (4 * vocab) // page * page)


def check_logits(tokens: int, vocab: int) -> None:
    """Raises InvalidRequest unless the logits of so many tokens fit this process's memory."""
    available = available_memory()
    needed = 4 * vocab * (tokens + piece_rows(vocab))
    if needed > available:
        raise InvalidRequest(
            f"the logits of {tokens} tokens need {_size(needed)} of memory, expected at most the "
            f"{_size(available)} that this process may use now: use iter_logits() or fewer tokens"
        )


def host_parts(
    info: ModelInfo,
    options: _C.EngineOptions,
    cache: CacheSize,
    available: int,
    isa: str,
    threads: int,
) -> list[Part]:
    """Returns the parts of the memory that an engine on the CPU will use once its cache is full."""
    weights = int(info.weight_bytes * _PADDING)
    steps = kept_bytes(info, options, isa, threads) - options.host_bytes
    if options.cache_pages:
        kv = Part("KV cache", pool_bytes(cache_groups(info), options), "cache_pages")
    else:
        free = max(0, available - weights - steps - options.host_bytes)
        kv = Part("KV cache", cache.of(free), "cache_memory")
    return [
        Part(f"weights as {info.weights_text}", weights, _smaller_weights(info)),
        kv,
        Part("host tier", options.host_bytes, "host_memory"),
        Part("steps", steps, "prefill_chunk"),
    ]


def loading_parts(info: ModelInfo) -> list[Part]:
    """Returns the parts of the memory that an engine takes while its weights are loaded."""
    weights = int(info.weight_bytes * _PADDING)
    return [
        Part(f"weights as {info.weights_text}", weights, _smaller_weights(info)),
        Part("loading", PACKING),
    ]


def _smaller_weights(info: ModelInfo) -> str:
    """Returns the option that makes the weights smaller."""
    return "dtype" if info.dtype == "float32" and not info.formats else ""


def cache_groups(info: ModelInfo) -> list[_C.CacheGroup]:
    """Returns the cache groups of a model that is not loaded yet."""
    return _C.plan_cache(info.description.to_core("bfloat16", info.kv_dtype, ""), info.tp)


def step_bytes(model: Description, options: _C.EngineOptions, ranks: int = 1) -> int:
    """Returns the bytes of activations and logits of the largest step on all ranks."""
    widest = max(
        4 * model.hidden
        + 2 * (layer.heads + 2 * layer.kv_heads) * layer.head_dim
        + 3 * layer.intermediate
        + _experts_width(layer, model.hidden)
        for layer in model.layers
    )
    widest += 2 * len(model.layers) * model.per_layer
    if ranks > 1:  # all have the residual stream, and two partial sums of it
        widest += (ranks - 1) * (4 * model.hidden + 2 * len(model.layers) * model.per_layer)
        widest += ranks * 2 * model.hidden
    rows = options.prefill_chunk + options.max_batch_size
    return 4 * (rows * widest + options.max_batch_size * model.vocab)


def _experts_width(layer: Layer, hidden: int) -> int:
    """Returns the values per token of experts: logits, choices, a row for each choice, and the
    output of an MLP beside them, and what a norm of their own returns."""
    experts = layer.experts
    if experts is None:
        return 0
    beside = hidden if layer.intermediate else 0
    normed = hidden if experts.own_norms else 0
    choices = experts.top_k * (4 + 2 * hidden + 3 * experts.intermediate)
    return experts.count + choices + beside + normed


def attention_bytes(model: Description, isa: str, threads: int) -> int:
    """Returns the bytes that attention works in, for any step and context."""
    widest = max(layer.head_dim for layer in model.layers)
    return _C.attention_scratch_bytes(isa, threads, widest, widest)


def check_parts(
    parts: list[Part], available: int, whose: str = "that this process may use now"
) -> None:
    """Raises InvalidRequest unless the sum of the parts is at most `available` bytes.

    Args:
        parts: The parts.
        available: The bytes.
        whose: Describes them in the message.
    """
    total = sum(part.bytes for part in parts)
    if total <= available:
        return
    listed = ", ".join(
        f"{part.name} {_size(part.bytes)}{f' ({part.option})' if part.option else ''}"
        for part in parts
        if part.bytes
    )
    lower = " or ".join(part.option for part in parts if part.option and part.bytes)
    hint = f": lower {lower}" if lower else ""
    raise InvalidRequest(
        f"the engine needs {_size(total)} of memory: {listed}; expected at most the "
        f"{_size(available)} {whose}{hint}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
