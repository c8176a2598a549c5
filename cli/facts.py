"""What a model's configuration alone says: sizes, and the bytes and FLOPs of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from turbomind import _C
from turbomind.loading.loader import KV_BYTES, WEIGHT_BYTES
from turbomind.models import Description

PAGE_TOKENS = _C.PAGE_TOKENS


@dataclass(frozen=True)
class Product:
    """A weight matrix [n, k] that every token of a step goes through; `count` of that shape."""

    name: str
    n: int
    k: int
    count: int

    @property
    def elements(self) -> int:
        """Of all `count` matrices."""
        return self.n * self.k * self.count


def products(model: Description) -> list[Product]:
    """The matrix products of a forward pass, those of one shape together, the head last."""
    counts: dict[tuple[str, int, int], int] = {}
    for layer in model.layers:
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        for shape in (
            ("qkv", q + 2 * kv, model.hidden),
            ("attn_out", model.hidden, q),
            ("gate_up", 2 * layer.intermediate, model.hidden),
            ("down", model.hidden, layer.intermediate),
        ):
            counts[shape] = counts.get(shape, 0) + 1
    found = [Product(name, n, k, count) for (name, n, k), count in counts.items()]
    return [*found, Product("head", model.vocab, model.hidden, 1)]


def step_weight_bytes(model: Description, dtype: str) -> int:
    """Bytes of weights that one decode step reads: all products, whatever the batch."""
    return sum(p.elements for p in products(model)) * WEIGHT_BYTES[dtype]


def page_bytes(model: Description, kv_dtype: str) -> int:
    """Bytes of PAGE_TOKENS tokens in the cache, all layers, padding of the heads included."""
    config = model.to_core("bfloat16", kv_dtype, "")
    return sum(group.page_bytes for group in _C.plan_cache(config))


def kv_read_bytes(model: Description, kv_dtype: str, context: int) -> int:
    """Bytes of KV one row reads to decode one token after `context` others; windows limit it."""
    return sum(
        2 * layer.kv_heads * layer.head_dim * KV_BYTES[kv_dtype] * _reach(layer.window, context + 1)
        for layer in model.layers
    )


def tokens_that_fit(model: Description, kv_dtype: str, cache_bytes: int) -> int:
    """Tokens of KV, all sequences together, in that much cache memory."""
    return cache_bytes // page_bytes(model, kv_dtype) * PAGE_TOKENS


def prefill_flops(model: Description, tokens: int) -> int:
    """FLOPs of a prompt of `tokens`, the last one's logits included, by the whole model: the last
    layer's output half counts for all tokens, though the engine computes it for sampled ones only.
    """
    body = sum(p.elements for p in products(model) if p.name != "head")
    return 2 * body * tokens + 2 * model.vocab * model.hidden + _attention_flops(model, 0, tokens)


def decode_flops(model: Description, context: int) -> int:
    """FLOPs of decoding one token after `context` others."""
    return 2 * sum(p.elements for p in products(model)) + _attention_flops(model, context, 1)


def _attention_flops(model: Description, start: int, tokens: int) -> int:
    total = 0
    for layer in model.layers:
        keys = sum(_reach(layer.window, p + 1) for p in range(start, start + tokens))
        total += 4 * layer.heads * layer.head_dim * keys
    return total


def _reach(window: int, tokens: int) -> int:
    return min(window, tokens) if window else tokens
