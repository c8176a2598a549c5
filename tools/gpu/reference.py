"""A decoder in plain torch with the engine's dummy weights: logits that share no code with ours.

Everything is computed in float32 from the weights' bfloat16 values, one layer in memory at a time.
"""

from __future__ import annotations

from typing import Any

from turbomind.models.description import Description, Layer

PIECE = 1 << 25  # weights made at once
WORD = (1 << 64) - 1


def mix(x: int) -> int:
    """Computes splitmix64 of a 64-bit number."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


class Weights:
    """The dummy weights of a seed, as `fill_dummy` of `DecoderBuilder` makes them."""

    def __init__(self, device: str, seed: int = 0) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.seed = seed

    def make(self, name: str, spread: float, *shape: int) -> Any:
        """Returns a weight as float32; `name` is that of the core's slot."""
        key = self.seed
        for byte in name.encode():
            key = mix(key ^ byte)
        total = 1
        for size in shape:
            total *= size
        out = self.torch.empty(total, dtype=self.torch.bfloat16, device=self.device)
        middle = 1.0 if name.endswith("norm") else 0.0
        for begin in range(0, total, PIECE):
            end = min(begin + PIECE, total)
            out[begin:end] = middle + spread * self._uniform(key, begin, end)
        return out.view(*shape).float()

    def _uniform(self, key: int, begin: int, end: int) -> Any:
        """Returns float32 values of -1 to 1: the high halves of splitmix64 of key + index."""
        torch = self.torch
        x = torch.arange(begin, end, dtype=torch.int64, device=self.device)
        x += _signed(key + 0x9E3779B97F4A7C15)
        x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
        x ^= _shifted(x, 31)
        return (x >> 32).float() * 2.0**-31

    def product(self, name: str, rows: int, columns: int) -> Any:
        """Returns the weight [rows, columns] of a matrix product."""
        return self.make(name, (3.0 / columns) ** 0.5, rows, columns)


def _signed(value: int) -> int:
    value &= WORD
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Any, bits: int) -> Any:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift repeats the sign


def last_logits(description: Description, device: str, ids: list[int], seed: int = 0) -> Any:
    """Returns the logits after the last of `ids`, a float32 array [vocab]."""
    import torch

    d, weights = description, Weights(device, seed)
    spread = (3.0 / d.hidden) ** 0.5 if d.tied_head else 3.0**0.5
    with torch.no_grad():
        x = weights.make("embed", spread, d.vocab, d.hidden)[torch.tensor(ids, device=device)]
        angles = _angles(d, len(ids), device)
        for i, layer in enumerate(d.layers):
            x = _layer(weights, d, layer, f"layers.{i}.", x, angles)
        x = _norm(x[-1:], weights.make("final_norm", 0.05, d.hidden), d.norm_eps)
        if d.tied_head:
            head = weights.make("embed", spread, d.vocab, d.hidden)
        else:
            head = weights.product("head", d.vocab, d.hidden)
        return (x @ head.T)[0].cpu().numpy()


def _layer(w: Weights, d: Description, c: Layer, at: str, x: Any, angles: Any) -> Any:
    from torch.nn import functional

    tokens, queries, keys = len(x), c.heads * c.head_dim, c.kv_heads * c.head_dim
    y = _norm(x, w.make(at + "attn_norm", 0.05, d.hidden), d.norm_eps)
    y = y @ w.product(at + "qkv", queries + 2 * keys, d.hidden).T
    if c.qkv_bias:
        y = y + w.make(at + "qkv_bias", 0.05, queries + 2 * keys)
    q, k, v = (
        part.view(tokens, -1, c.head_dim).transpose(0, 1)
        for part in y.split([queries, keys, keys], dim=-1)
    )
    k, v = (
        part.repeat_interleave(c.heads // c.kv_heads, dim=0) for part in (_turned(k, angles), v)
    )
    y = functional.scaled_dot_product_attention(
        _turned(q, angles)[None], k[None], v[None], is_causal=True
    )[0]
    y = y.transpose(0, 1).reshape(tokens, queries)
    x = x + y @ w.product(at + "o", d.hidden, queries).T
    y = _norm(x, w.make(at + "mlp_norm", 0.05, d.hidden), d.norm_eps)
    gate, up = (y @ w.product(at + "gate_up", 2 * c.intermediate, d.hidden).T).chunk(2, dim=-1)
    return x + (functional.silu(gate) * up) @ w.product(at + "down", d.hidden, c.intermediate).T


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _angles(d: Description, tokens: int, device: str) -> tuple[Any, Any]:
    import torch

    inverse = torch.tensor(d.rope.inv_freq, dtype=torch.float32, device=device)
    turns = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * inverse
    factor = d.rope.attention_factor
    return turns.cos() * factor, turns.sin() * factor


def _turned(x: Any, angles: tuple[Any, Any]) -> Any:
    """Applies rotary embeddings to x [heads, tokens, dim]."""
    import torch

    cos, sin = angles
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
