"""Facts of a model and of a machine, without loading: sizes, and bytes and FLOPs of steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import turbomind._C as _C
from turbomind.config.defaults import pool_sizes
from turbomind.config.device import (
    device_name,
    gpu_fault,
    gpu_options,
    library_folders,
    rank_count,
)
from turbomind.config.engine_options import core_options
from turbomind.loading.loader import KV_BYTES, ModelInfo
from turbomind.machine import physical_cores
from turbomind.models import Description, Layer

PAGE_TOKENS = _C.PAGE_TOKENS


@dataclass(frozen=True)
class Product:
    """`count` weight matrices of shape [n, k] that every token of a step is multiplied with."""

    name: str
    n: int
    k: int
    count: int

    @property
    def elements(self) -> int:
        """Number of elements of all `count` matrices."""
        return self.n * self.k * self.count


def products(model: Description) -> list[Product]:
    """Returns the matrix products of a forward pass, grouped by shape, the head last."""
    counts: dict[tuple[str, int, int], int] = {}
    for layer in model.layers:
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        for shape in (
            ("qkv", q + (2 * kv if layer.kv_layer < 0 else 0), model.hidden),
            ("attn_out", model.hidden, q),
            *_mlp_products(layer, model.hidden),
            *_per_layer_products(model),
        ):
            counts[shape] = counts.get(shape, 0) + 1
    found = [Product(name, n, k, count) for (name, n, k), count in counts.items()]
    return [*found, Product("head", model.vocab, model.hidden, 1)]


def _mlp_products(layer: Layer, hidden: int) -> list[tuple[str, int, int]]:
    """Returns the products of an MLP, of a router and of the experts of a token."""

    def gated(inner: int) -> list[tuple[str, int, int]]:
        return [("gate_up", 2 * inner, hidden), ("down", hidden, inner)]

    mlp = gated(layer.intermediate) if layer.intermediate else []
    if layer.experts is None:
        return mlp
    experts = gated(layer.experts.intermediate) * layer.experts.top_k
    return [*mlp, ("router", layer.experts.count, hidden), *experts]


def _per_layer_products(model: Description) -> list[tuple[str, int, int]]:
    """Returns the products with which a layer computes and mixes in its per-layer input."""
    if not model.per_layer:
        return []
    into = ("per_layer_in", model.per_layer, model.hidden)
    return [into, into, ("per_layer_out", model.hidden, model.per_layer)]


def page_bytes(model: Description, kv_dtype: str, ranks: int = 1) -> int:
    """Returns the bytes of PAGE_TOKENS tokens of KV, all layers and ranks, including padding of the
    heads."""
    config = model.to_core("bfloat16", kv_dtype, "")
    return sum(group.page_bytes for group in _C.plan_cache(config, ranks))


def kv_read_bytes(model: Description, kv_dtype: str, context: int) -> int:
    """Returns the bytes of KV that one sequence reads to decode a token after `context` others."""
    return sum(
        2 * layer.kv_heads * layer.head_dim * KV_BYTES[kv_dtype] * _reach(layer.window, context + 1)
        for layer in model.layers
    )


def tokens_that_fit(model: Description, kv_dtype: str, cache_bytes: int, ranks: int = 1) -> int:
    """Returns how many tokens of KV, of all sequences together, fit in `cache_bytes`.

    Layers with windows hold no more than those, as in an engine on the CPU with default options.
    """
    return max(_pages_that_fit(model, kv_dtype, cache_bytes, ranks)) * PAGE_TOKENS


def rank_memory(info: ModelInfo, cache_bytes: int) -> tuple[int, list[dict[str, int]]]:
    """Returns the bytes that ranks share, and those that each rank alone has.

    Args:
        info: The model.
        cache_bytes: Memory of the KV cache of all ranks, in bytes.

    Returns:
        Bytes of the shared weights, and of each rank `weight_bytes`, `bytes_per_token` of KV and
        `cache_bytes`, its part of the pages that fit in `cache_bytes`.
    """
    pages = _pages_that_fit(info.description, info.kv_dtype, cache_bytes, info.tp)
    shared, ranks = info.memory
    return shared, [
        {
            "weight_bytes": weights,
            "bytes_per_token": sum(page_bytes) // PAGE_TOKENS,
            "cache_bytes": sum(n * each for n, each in zip(pages, page_bytes, strict=True)),
        }
        for weights, page_bytes in ranks
    ]


def _pages_that_fit(model: Description, kv_dtype: str, cache_bytes: int, ranks: int) -> list[int]:
    groups = _C.plan_cache(model.to_core("bfloat16", kv_dtype, ""), ranks)
    options, _ = core_options({})
    return pool_sizes(groups, options, cache_bytes)


def prefill_flops(model: Description, tokens: int) -> int:
    """Returns the FLOPs of the prefill of `tokens` and of one row of logits.

    All layers count for all tokens, although the engine skips the second half of the last layer
    for tokens that are not sampled.
    """
    body = sum(p.elements for p in products(model) if p.name != "head")
    return 2 * body * tokens + 2 * model.vocab * model.hidden + _attention_flops(model, 0, tokens)


def decode_flops(model: Description, context: int) -> int:
    """Returns the FLOPs of decoding one token after `context` others."""
    return 2 * sum(p.elements for p in products(model)) + _attention_flops(model, context, 1)


def _attention_flops(model: Description, start: int, tokens: int) -> int:
    total = 0
    for layer in model.layers:
        keys = sum(_reach(layer.window, p + 1) for p in range(start, start + tokens))
        total += 4 * layer.heads * layer.head_dim * keys
    return total


def _reach(window: int, tokens: int) -> int:
    return min(window, tokens) if window else tokens


def machine(device: str = "auto", tp: int | None = None) -> dict[str, Any]:
    """Returns the facts about this machine: processor, memory, instruction sets and GPUs.

    Args:
        device: The device to resolve, as on the command line.
        tp: The ranks, as on the command line.
    """
    chosen = gpu_options(device, tp=tp)
    fault = gpu_fault(rank_count(tp, device))
    gpus = [found for found in _C.gpu_devices() if found.kind == "cuda"]
    return {
        "cpu": _C.cpu_name(),
        "threads": physical_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "isa": _C.resolve_isa("auto"),
        "available_isas": _C.available_isas(),
        "amx_hindrance": _C.amx_hindrance() or None,
        "device": device_name(chosen),
        "gpu_fault": fault or None,
        "cublaslt": None if fault else _C.cublaslt_note(library_folders()),
        "gpus": [
            {
                "name": found.name,
                "memory_bytes": found.total_bytes,
                "compute_capability": "{}.{}".format(*found.compute_capability),
            }
            for found in gpus
        ],
    }
