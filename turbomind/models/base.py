"""The base of all decoder-only families: the description of a model and the sources of its weights.

A family is a subclass of `Family` in its own file. It reads the config fields that only it has and
names the source tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.models.config import Fields
from turbomind.models.rope import MAX_CONTEXT, Rope, read_rope

MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1024  # as the kernels that write keys and values take


@dataclass(frozen=True)
class Layer:
    """One layer, in elements. `window` in tokens, 0: full attention."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    window: int = 0
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class Description:
    """A model as its config describes it, in the fields that the core needs."""

    architecture: str
    hidden: int
    vocab: int
    max_context: int
    norm_eps: float
    tied_head: bool
    rope: Rope
    layers: tuple[Layer, ...]

    def to_core(self, weight_format: str, kv_dtype: str, fingerprint: str) -> _C.ModelConfig:
        """Converts the description to the core's struct."""
        config = _C.ModelConfig()
        config.fingerprint = fingerprint
        config.hidden, config.vocab = self.hidden, self.vocab
        config.max_context = self.max_context
        config.norm_eps = self.norm_eps
        config.tied_head = self.tied_head
        config.weight_format, config.kv_dtype = weight_format, kv_dtype
        table = _C.RopeTable()
        table.inv_freq = list(self.rope.inv_freq)
        table.attention_factor = self.rope.attention_factor
        config.ropes = [table]
        config.layers = [_core_layer(layer) for layer in self.layers]
        return config


def _core_layer(layer: Layer) -> _C.LayerConfig:
    config = _C.LayerConfig()
    config.heads, config.kv_heads = layer.heads, layer.kv_heads
    config.k_dim = config.v_dim = layer.head_dim
    config.intermediate = layer.intermediate
    config.window = layer.window
    config.rope = 0
    config.qk_norm = layer.qk_norm
    config.qkv_bias, config.o_bias = layer.qkv_bias, layer.o_bias
    config.mlp_bias = layer.mlp_bias
    return config


@dataclass(frozen=True)
class Rows:
    """Rows [begin, begin + count) of a source tensor that must have `shape`."""

    tensor: str
    shape: tuple[int, ...]
    begin: int
    count: int


def whole(tensor: str, *shape: int) -> list[Rows]:
    """Returns a whole source tensor as one piece."""
    return [Rows(tensor, shape, 0, shape[0])]


class Family:
    """A decoder-only family: pre-norm, RMS norm, rotary attention, gated SiLU MLP.

    Class attributes name the tensors (`{i}` is the layer) and give the values that the reference
    implementation assumes for absent fields.
    """

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    default_max_positions: ClassVar[int] = 2048
    default_kv_heads: ClassVar[int | None] = None  # None: as many as query heads
    default_head_dim: ClassVar[int | None] = None  # None: hidden / heads

    embed: ClassVar[str] = "model.embed_tokens"
    head: ClassVar[str] = "lm_head"
    final_norm: ClassVar[str] = "model.norm"
    attn_norm: ClassVar[str] = "model.layers.{i}.input_layernorm"
    mlp_norm: ClassVar[str] = "model.layers.{i}.post_attention_layernorm"
    q: ClassVar[str] = "model.layers.{i}.self_attn.q_proj"
    k: ClassVar[str] = "model.layers.{i}.self_attn.k_proj"
    v: ClassVar[str] = "model.layers.{i}.self_attn.v_proj"
    o: ClassVar[str] = "model.layers.{i}.self_attn.o_proj"
    q_norm: ClassVar[str] = "model.layers.{i}.self_attn.q_norm"
    k_norm: ClassVar[str] = "model.layers.{i}.self_attn.k_norm"
    gate: ClassVar[str] = "model.layers.{i}.mlp.gate_proj"
    up: ClassVar[str] = "model.layers.{i}.mlp.up_proj"
    down: ClassVar[str] = "model.layers.{i}.mlp.down_proj"

    def __init__(self) -> None:
        self.unknown_fields: tuple[str, ...] = ()
        """Fields of the config that `describe()` read last which no implementation is known to
        read."""

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Returns `layer` with the flags of this family, read from its own fields."""
        return layer

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Returns the attention window of each layer, in tokens; 0 means full attention."""
        return layer_windows(fields, layers, 0, 0)

    def describe(self, values: Mapping[str, Any], rope_length: int | None = None) -> Description:
        """Reads a config.

        Args:
            values: The fields of config.json.
            rope_length: Tokens that dynamic NTK rope scaling is computed for.

        Raises:
            ModelError: A field is wrong or not supported; the message has its name and value.
        """
        fields = Fields(values)
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
        fields.choice("hidden_act", ("silu",), "silu")
        max_positions = fields.integer(
            "max_position_embeddings", 1, MAX_CONTEXT, self.default_max_positions
        )
        layer = Layer(
            heads=heads,
            kv_heads=self._kv_heads(fields, heads),
            head_dim=self._head_dim(fields, hidden, heads),
            intermediate=fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
        )
        layer = self.traits(fields, layer)
        rope = read_rope(fields, layer.head_dim, max_positions, rope_length)
        count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        # A window as long as the context is full attention.
        windows = [w if w < rope.max_context else 0 for w in self.windows(fields, count)]
        description = Description(
            architecture=self.architecture,
            hidden=hidden,
            vocab=fields.integer("vocab_size", 2, MAX_VOCAB),
            max_context=rope.max_context,
            norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
            tied_head=fields.flag("tie_word_embeddings", False),
            rope=rope,
            layers=tuple(replace(layer, window=w) for w in windows),
        )
        self.unknown_fields = fields.finish()
        return description

    def _kv_heads(self, fields: Fields, heads: int) -> int:
        # Absent means the family's default, null means multi-head attention.
        default = heads
        if not fields.has("num_key_value_heads") and self.default_kv_heads is not None:
            default = self.default_kv_heads
        kv_heads: int = fields.integer("num_key_value_heads", 1, heads, default)
        if kv_heads > heads or heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        return kv_heads

    def _head_dim(self, fields: Fields, hidden: int, heads: int) -> int:
        given = fields.integer("head_dim", 1, MAX_HEAD_DIM, None)
        if given is None and not fields.has("head_dim"):
            given = self.default_head_dim
        if given is None:
            if hidden % heads:
                raise fields.error(
                    "hidden_size", f"a multiple of num_attention_heads, {heads}, without a head_dim"
                )
            given = hidden // heads
        if given % 2 or given > MAX_HEAD_DIM:
            raise ModelError(
                f"{fields.where}: head_dim is {given}, expected an even number up to {MAX_HEAD_DIM}"
            )
        return int(given)

    def slots(self, model: Description) -> Iterator[tuple[str, list[Rows]]]:
        """Yields each weight slot of the core with the rows that fill it, in checkpoint order."""
        yield "embed", whole(f"{self.embed}.weight", model.vocab, model.hidden)
        for i, layer in enumerate(model.layers):
            for slot, rows in self._layer_slots(model, layer):
                yield (
                    f"layers.{i}.{slot}",
                    [replace(r, tensor=r.tensor.replace("{i}", str(i))) for r in rows],
                )
        yield "final_norm", whole(f"{self.final_norm}.weight", model.hidden)
        if not model.tied_head:
            yield "head", whole(f"{self.head}.weight", model.vocab, model.hidden)

    def _layer_slots(self, model: Description, layer: Layer) -> Iterator[tuple[str, list[Rows]]]:
        hidden, inner = model.hidden, layer.intermediate
        yield "attn_norm", whole(f"{self.attn_norm}.weight", hidden)
        yield "qkv", self.qkv_rows("weight", layer, hidden)
        if layer.qkv_bias:
            yield "qkv_bias", self.qkv_rows("bias", layer)
        if layer.qk_norm:
            yield "q_norm", whole(f"{self.q_norm}.weight", layer.head_dim)
            yield "k_norm", whole(f"{self.k_norm}.weight", layer.head_dim)
        yield "o", whole(f"{self.o}.weight", hidden, layer.heads * layer.head_dim)
        if layer.o_bias:
            yield "o_bias", whole(f"{self.o}.bias", hidden)
        yield "mlp_norm", whole(f"{self.mlp_norm}.weight", hidden)
        gate, up = (whole(f"{name}.weight", inner, hidden) for name in (self.gate, self.up))
        yield "gate_up", gate + up
        if layer.mlp_bias:
            gate, up = (whole(f"{name}.bias", inner) for name in (self.gate, self.up))
            yield "gate_up_bias", gate + up
        yield "down", whole(f"{self.down}.weight", hidden, inner)
        if layer.mlp_bias:
            yield "down_bias", whole(f"{self.down}.bias", hidden)

    def qkv_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns the rows of the fused projection: all q heads, then k heads, then v heads."""
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        return [
            *whole(f"{self.q}.{kind}", q, *columns),
            *whole(f"{self.k}.{kind}", kv, *columns),
            *whole(f"{self.v}.{kind}", kv, *columns),
        ]

    def ignored_tensor(self, name: str, model: Description) -> bool:
        """Returns whether a tensor of older checkpoints is unused and may be ignored."""
        return name.endswith("rotary_emb.inv_freq") or (
            model.tied_head and name == f"{self.head}.weight"
        )


def layer_windows(fields: Fields, layers: int, window: int, first: int) -> list[int]:
    """Returns windows by `layer_types` if present, else `window` from layer `first` on."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return [window if i >= first else 0 for i in range(layers)]
    names = ("full_attention", "sliding_attention") if window else ("full_attention",)
    known = isinstance(kinds, list) and all(kind in names for kind in kinds)
    if not known or len(kinds) != layers:
        raise fields.error("layer_types", f"{layers} times {' or '.join(map(repr, names))}")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def optional_windows(fields: Fields, layers: int) -> list[int]:
    """Returns windows if `use_sliding_window` is set, for layers from `max_window_layers` on."""
    on = fields.flag("use_sliding_window", False)
    window = fields.integer(
        "sliding_window", 0 if not on else 1, MAX_CONTEXT, 0 if not on else None
    )
    first = fields.integer("max_window_layers", 0, 1 << 20, 28)
    if not on:
        return layer_windows(fields, layers, 0, 0)
    if window is None:
        window = 0 if fields.has("sliding_window") else 4096
    return layer_windows(fields, layers, window, first)
