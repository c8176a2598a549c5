"""memo as a torch module: a Llama with grouped queries and a tied head, written to train on a CPU.

Parameter names are those of transformers' LlamaForCausalLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

# Query rows per block. Within a block, scores above the diagonal are computed too.
_QUERY_BLOCK = 256
# Scores computed at once. They fit the processor's cache.
_SCORES = 2 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `context` is the longest sequence, in tokens."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 704
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


class _Attention(torch.autograd.Function):
    """Causal attention of (batch, heads, length, head_dim) queries to fewer key heads.

    torch's own kernel takes three times as long on such small heads (2 cores, length 256).
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):  # type: ignore[no-untyped-def]
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        out = torch.empty_like(q)
        saved = []
        for rows, begin, end in _blocks(batch, heads, length):
            queries = q[rows, :, begin:end].reshape(-1, kv_heads, group * (end - begin), dim)
            scores = torch.matmul(queries, k[rows, :, :end].transpose(-1, -2)).mul_(scale)
            scores = scores.view(-1, kv_heads, group, end - begin, end)
            scores[..., begin:].add_(_above_diagonal(end - begin, q.dtype))
            weights = torch.softmax(scores, -1).flatten(2, 3)
            got = torch.matmul(weights, v[rows, :, :end])
            out[rows, :, begin:end] = got.view(-1, heads, end - begin, dim)
            saved.append(weights)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, *saved = ctx.saved_tensors
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (rows, begin, end), weights in zip(_blocks(batch, heads, length), saved, strict=True):
            flat = (-1, kv_heads, group * (end - begin), dim)
            g = grad[rows, :, begin:end].reshape(flat)
            dv[rows, :, :end] += torch.matmul(weights.transpose(-1, -2), g)
            d = torch.matmul(g, v[rows, :, :end].transpose(-1, -2))
            d = torch._softmax_backward_data(d, weights, -1, d.dtype).mul_(ctx.scale)
            queries = q[rows, :, begin:end].reshape(flat)
            dq[rows, :, begin:end] = torch.matmul(d, k[rows, :, :end]).view(
                -1, heads, end - begin, dim
            )
            dk[rows, :, :end] += torch.matmul(d.transpose(-1, -2), queries)
        return dq, dk, dv, None


def _blocks(batch: int, heads: int, length: int) -> list[tuple[slice, int, int]]:
    blocks = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        rows = max(1, _SCORES // (heads * (end - begin) * end))
        blocks += [(slice(r, min(r + rows, batch)), begin, end) for r in range(0, batch, rows)]
    return blocks


_masks: dict[tuple[int, torch.dtype], Tensor] = {}


def _above_diagonal(size: int, dtype: torch.dtype) -> Tensor:
    if (size, dtype) not in _masks:
        _masks[size, dtype] = torch.full((size, size), float("-inf"), dtype=dtype).triu(1)
    return _masks[size, dtype]


class _SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = (
            functional.linear(x, weights)
            .view(batch, length, -1, self.shape.head_dim)
            .transpose(1, 2)
        )
        n, m = self.shape.heads, self.shape.kv_heads
        turned = _rotate(heads[:, : n + m], cos, sin)
        out = _Attention.apply(
            turned[:, :n], turned[:, n:], heads[:, n + m :], self.shape.head_dim**-0.5
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.self_attn = _SelfAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)


class Memo(nn.Module):
    """The model: maps (batch, length) tokens to the normed states of the last layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if deep else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, length) token ids to (batch, length, width) states."""
        cos, sin = self._angles(tokens.shape[1])
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def loss(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of the cross entropy of each next token, and the sum of the
        weights.

        `weights` is (batch, length): at position t the weight of predicting the token at t + 1. The
        head is computed only where it is not 0.
        """
        states = self(tokens)[:, :-1]
        chosen = weights[:, :-1] > 0
        logits = functional.linear(states[chosen], self.model.embed_tokens.weight).float()
        each = functional.cross_entropy(logits, tokens[:, 1:][chosen], reduction="none")
        kept = weights[:, :-1][chosen]
        return (each * kept).sum(), kept.sum()

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        steps = self.shape.rope_theta ** -(torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(length)[:, None].float() * steps
        dtype = self.model.embed_tokens.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def save(weights: dict[str, Tensor], shape: Shape, folder: Path, **ids: int) -> None:
    """Writes config.json and model.safetensors (bfloat16) as transformers reads them.

    `ids` are bos_token_id, eos_token_id and pad_token_id.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
