"""A model as its config describes it, and the rows of tensors that its weights are made of.

Not here: how a family reads its config (`base`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import turbomind._C as _C
from turbomind.models.rope import Rope


def _later(default: Any) -> Any:
    """Returns a field that `facts()` leaves out at its default.

    Models that were described before the field existed keep their fingerprint, and so their stored
    KV. Fields that are added from now on are declared with it.
    """
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True)
class Experts:
    """Experts in place of a layer's MLP, or beside it.

    Attributes:
        count: Number of experts.
        top_k: Experts that each token takes.
        intermediate: Width of an expert.
        renormalize: The weights of a token's experts have the sum 1; else they are the shares of
            these experts in a softmax over all.
        router_bias: The router has a bias.
        bias: The products of each expert have biases.
        scaled: Each expert has a factor of its own, by which its weights are multiplied.
        own_norms: The MLP and the experts beside it have norms of their own, as has the router.
    """

    count: int
    top_k: int
    intermediate: int
    renormalize: bool
    router_bias: bool = _later(False)
    bias: bool = _later(False)
    scaled: bool = _later(False)
    own_norms: bool = _later(False)


@dataclass(frozen=True)
class Layer:
    """One layer, in elements.

    Attributes:
        intermediate: Width of the MLP; 0 for none beside experts.
        window: Tokens that attention reaches back, itself included; 0: all.
        rope: Number of the rope table; -1: q and k are not rotated.
        attn_scale: Factor of q k; 0: 1 / sqrt(head_dim).
        residual_scale: Factor of what attention and MLP add to the residual stream.
        softcap: Bound of attention's scores, by tanh; 0: none.
        activation: Of the MLP's gate: "silu", "gelu_tanh", or "swiglu" for gpt-oss's own.
        post_norms: Norms after attention and MLP, beside those before.
        mlp_gate: A weight scales the MLP beside experts, by the sigmoid of its product.
        qk_norm_all: Norms of q and of k across all heads; `qk_norm` is per head.
        sinks: An extra logit per head in the softmax of attention.
        v_norm: V is normed per head, without a weight.
        k_eq_v: The rows of K's projection are those of V's too.
        kv_layer: Earlier layer whose KV attention reads; -1: the layer has its own.
        scaled: The residual stream is multiplied by a weight after the layer.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    window: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    rope: int = _later(0)
    attn_scale: float = _later(0.0)
    residual_scale: float = _later(1.0)
    softcap: float = _later(0.0)
    activation: str = _later("silu")
    post_norms: bool = _later(False)
    mlp_gate: bool = _later(False)
    qk_norm_all: bool = _later(False)
    sinks: bool = _later(False)
    experts: Experts | None = field(default=None, metadata={"later": True})  # as `_later`
    v_norm: bool = _later(False)
    k_eq_v: bool = _later(False)
    kv_layer: int = _later(-1)
    scaled: bool = _later(False)


@dataclass(frozen=True)
class Description:
    """A model as its config describes it, in the fields that the core needs.

    Attributes:
        rope: The first rope table.
        embed_scale: Factor of the embeddings.
        logit_scale: Factor of the logits.
        other_ropes: The rope tables after the first.
        norm_offset: Added to the weights of norms.
        final_softcap: Bound of logits, by tanh; 0: none.
        per_layer: Width of the per-layer inputs, rows of a second embedding that each layer mixes
            into its residual stream; 0: none.
    """

    architecture: str
    hidden: int
    vocab: int
    max_context: int
    norm_eps: float
    tied_head: bool
    rope: Rope
    layers: tuple[Layer, ...]
    embed_scale: float = _later(1.0)
    logit_scale: float = _later(1.0)
    other_ropes: tuple[Rope, ...] = _later(())
    norm_offset: float = _later(0.0)
    final_softcap: float = _later(0.0)
    per_layer: int = _later(0)

    def facts(self) -> dict[str, Any]:
        """Returns all that KV depends on as JSON values; see `_later`."""
        facts: dict[str, Any] = _facts(self)
        return facts

    def to_core(self, weight_format: str, kv_dtype: str, fingerprint: str) -> _C.ModelConfig:
        """Converts the description to the core's struct."""
        config = _C.ModelConfig()
        config.fingerprint = fingerprint
        config.hidden, config.vocab = self.hidden, self.vocab
        config.max_context = self.max_context
        config.norm_eps, config.norm_weight_offset = self.norm_eps, self.norm_offset
        config.tied_head = self.tied_head
        config.embed_scale, config.logit_scale = self.embed_scale, self.logit_scale
        config.final_softcap, config.per_layer = self.final_softcap, self.per_layer
        config.weight_format, config.kv_dtype = weight_format, kv_dtype
        config.ropes = [_core_rope(rope) for rope in (self.rope, *self.other_ropes)]
        config.layers = [_core_layer(layer) for layer in self.layers]
        return config


def _facts(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_facts(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        f.name: _facts(getattr(value, f.name))
        for f in dataclasses.fields(value)
        if not (f.metadata.get("later") and getattr(value, f.name) == f.default)
    }


def _core_rope(rope: Rope) -> _C.RopeTable:
    table = _C.RopeTable()
    table.inv_freq = list(rope.inv_freq)
    table.attention_factor = rope.attention_factor
    table.interleaved = rope.interleaved
    return table


def _core_layer(layer: Layer) -> _C.LayerConfig:
    config = _C.LayerConfig()
    config.heads, config.kv_heads = layer.heads, layer.kv_heads
    config.k_dim = config.v_dim = layer.head_dim
    config.intermediate = layer.intermediate
    config.window, config.kv_layer = layer.window, layer.kv_layer
    config.rope = layer.rope
    config.attn_scale, config.residual_scale = layer.attn_scale, layer.residual_scale
    config.softcap, config.activation = layer.softcap, layer.activation
    config.qk_norm, config.v_norm = layer.qk_norm, layer.v_norm
    config.post_norms, config.scaled = layer.post_norms, layer.scaled
    config.qkv_bias, config.o_bias = layer.qkv_bias, layer.o_bias
    config.mlp_bias, config.mlp_gate = layer.mlp_bias, layer.mlp_gate
    config.qk_norm_all, config.sinks = layer.qk_norm_all, layer.sinks
    if layer.experts is not None:
        config.experts = _core_experts(layer.experts)
    return config


def _core_experts(experts: Experts) -> _C.ExpertsConfig:
    config = _C.ExpertsConfig()
    config.count, config.top_k = experts.count, experts.top_k
    config.intermediate = experts.intermediate
    config.renormalize = experts.renormalize
    config.router_bias, config.bias = experts.router_bias, experts.bias
    config.scaled, config.own_norms = experts.scaled, experts.own_norms
    return config


ZEROS = ""
"""The tensor of rows of zeros, of a bias that a file leaves out."""


@dataclass(frozen=True)
class Rows:
    """`count` rows of a source tensor that must have `shape`.

    Attributes:
        begin: The first row.
        index: Which of the matrices, or vectors, that the tensor stacks; None: it is one itself.
        step: Distance of the rows: 2 takes every other one.
        transposed: Rows of the matrix are columns of what the file has.
    """

    tensor: str
    shape: tuple[int, ...]
    begin: int
    count: int
    index: int | None = None
    step: int = 1
    transposed: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the matrix or vector in the file."""
        return self.shape if self.index is None else self.shape[1:]

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.part[0] if self.transposed else math.prod(self.part[1:])

    @property
    def contiguous(self) -> bool:
        """Whether the rows lie one after the other in the file."""
        return self.step == 1 and not self.transposed


def whole(tensor: str, *shape: int) -> list[Rows]:
    """Returns a whole source tensor as one piece."""
    return [Rows(tensor, shape, 0, shape[0])]
