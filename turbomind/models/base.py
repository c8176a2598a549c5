"""The base of all decoder-only families: reads a config and names the sources of the weights.

A family is a subclass of `Family` in its own file. It reads the config fields that only it has and
names the source tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from turbomind.errors import ModelError
from turbomind.models.config import Fields
from turbomind.models.description import Description, Experts, Layer, Rows, whole
from turbomind.models.gguf import Architecture
from turbomind.models.reference import fields_read
from turbomind.models.rope import MAX_CONTEXT, Rope, RopeRules, read_rope
from turbomind.models.wrapper import Wrapper, encoders, language_tensor

MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_LAYERS = 4096
_ROTATIONS = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
MAX_HEAD_DIM = 1024  # as the kernels that write keys and values take

# Fields for which the reference has defaults, and which a config must nevertheless have.
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts")  # of which a config has one


class Family:
    """A decoder-only family: pre-norm, RMS norm, rotary attention, gated SiLU MLP or experts.

    Class attributes name the tensors (`{i}` is the layer, `{j}` the expert).
    """

    names: ClassVar[Mapping[str, str]]
    """The `architectures` of the family with their `model_type`."""
    wrappers: ClassVar[Mapping[str, Wrapper]] = {}
    """The architectures whose language model is of this family."""
    rope_rules: ClassVar[RopeRules] = RopeRules()

    embed: ClassVar[str] = "model.embed_tokens"
    head: ClassVar[str] = "lm_head"
    final_norm: ClassVar[str] = "model.norm"
    attn_norm: ClassVar[str] = "model.layers.{i}.input_layernorm"
    attn_post_norm: ClassVar[str]
    mlp_norm: ClassVar[str] = "model.layers.{i}.post_attention_layernorm"
    mlp_post_norm: ClassVar[str]
    q: ClassVar[str] = "model.layers.{i}.self_attn.q_proj"
    k: ClassVar[str] = "model.layers.{i}.self_attn.k_proj"
    v: ClassVar[str] = "model.layers.{i}.self_attn.v_proj"
    o: ClassVar[str] = "model.layers.{i}.self_attn.o_proj"
    q_norm: ClassVar[str] = "model.layers.{i}.self_attn.q_norm"
    k_norm: ClassVar[str] = "model.layers.{i}.self_attn.k_norm"
    gate: ClassVar[str] = "model.layers.{i}.mlp.gate_proj"
    up: ClassVar[str] = "model.layers.{i}.mlp.up_proj"
    down: ClassVar[str] = "model.layers.{i}.mlp.down_proj"
    mlp_gate: ClassVar[str]
    sinks: ClassVar[str] = "model.layers.{i}.self_attn.sinks"
    router: str = "model.layers.{i}.mlp.gate"
    expert_gate: ClassVar[str] = "model.layers.{i}.mlp.experts.{j}.gate_proj"
    expert_up: ClassVar[str] = "model.layers.{i}.mlp.experts.{j}.up_proj"
    expert_down: ClassVar[str] = "model.layers.{i}.mlp.experts.{j}.down_proj"
    gate_ups: str = ""  # a tensor that stacks the gates and ups of all experts, and
    downs: str = ""  # one that stacks the downs, in place of the three names before
    gguf: ClassVar[Mapping[str, Architecture]] = {}
    """By the name in GGUF files, what those say otherwise. A subclass does not inherit them."""
    modules: ClassVar[Mapping[str, str]] = {}
    """Attributes of this class as transformers 5 names the tensors of its modules, which stack the
    experts; `save_pretrained(save_original_format=False)` writes them."""
    router_norm: ClassVar[str]
    expert_scale: ClassVar[str]
    experts_norm: ClassVar[str]
    experts_post_norm: ClassVar[str]
    experts_mlp_post_norm: ClassVar[str]
    scale: ClassVar[str]
    per_layer_embed: ClassVar[str]
    per_layer_projection: ClassVar[str]
    per_layer_norm: ClassVar[str]
    per_layer_gate: ClassVar[str]
    per_layer_out: ClassVar[str]
    per_layer_post_norm: ClassVar[str]

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.wrapper = self.wrappers.get(architecture)
        self.unknown_fields: tuple[str, ...] = ()
        """Fields of the config that `describe()` read last which the reference does not read."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.architecture))

    @property
    def model_type(self) -> str:
        """The `model_type` of the language model; without an architecture the family's first."""
        if self.wrapper:
            return self.wrapper.text_type
        kinds = [*self.names.values(), *(each.text_type for each in self.wrappers.values())]
        return self.names.get(self.architecture, kinds[0])

    def as_stored(self, names: Collection[str | None]) -> Family:
        """Returns this family with the names of a checkpoint's tensors.

        Args:
            names: The tensors, by `tensor_name`.
        """
        start, _, end = self.modules.get("gate_ups", "").partition("{i}")
        if not end or not any(n and n.startswith(start) and n.endswith(end) for n in names):
            return self
        family = copy.copy(self)
        for attribute, name in self.modules.items():
            setattr(family, attribute, name)
        return family

    def text_fields(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the fields of the language model in those of a config.json."""
        return self.wrapper.text_fields(values) if self.wrapper else values

    def encoders(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the parts of the model that are not loaded: "vision", "audio"."""
        return encoders(values) if self.wrapper else ()

    def tensor_name(self, name: str) -> str | None:
        """Returns the name by which `slots` refers to a tensor of a checkpoint; None for a tensor
        that belongs to `encoders`."""
        return language_tensor(name) if self.wrapper else name

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Returns `layer` with the flags of this family, read from its own fields."""
        return layer

    def activation(self, fields: Fields) -> str:
        """Returns the activation of the MLP's gate."""
        fields.choice("hidden_act", ("silu", "swish"), "silu")
        return "silu"

    def rope_tables(
        self, fields: Fields, head_dim: int, max_positions: int, length: int | None
    ) -> list[Rope]:
        """Returns the rope tables, to which `ropes` refers; `read_rope` has the arguments."""
        return [read_rope(fields, self.rope_rules, head_dim, max_positions, length)]

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Returns the attention window of each layer, in tokens; 0 means full attention."""
        return layer_windows(fields, layers, 0, 0)

    def ropes(self, fields: Fields, layers: int) -> list[int]:
        """Returns the rope table of each layer; -1 means no rotation."""
        return [0] * layers

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns `layer` with the MLP or the experts of each layer."""
        return [layer] * layers

    def ends(self, fields: Fields, model: Description) -> Description:
        """Returns `model` with what this family does to embeddings and logits."""
        return model

    def describe(
        self, values: Mapping[str, Any] | Fields, rope_length: int | None = None
    ) -> Description:
        """Reads a config.

        Args:
            values: The fields of config.json, or of another file in its terms.
            rope_length: Tokens that a rope scaling which depends on a length is computed for.

        Raises:
            ModelError: A field is wrong or not supported; the message has its name and value.
        """
        if isinstance(values, Fields):
            fields = values
        else:
            fields = Fields({**self._defaults(), **self.text_fields(values)})
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
        max_positions = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
        layer = Layer(
            heads=heads,
            kv_heads=self._kv_heads(fields, heads),
            head_dim=self._head_dim(fields, hidden, heads),
            intermediate=fields.integer("intermediate_size", 1, 4 * MAX_WIDTH),
            activation=self.activation(fields),
        )
        layer = self.traits(fields, layer)
        rope, *others = self.rope_tables(fields, layer.head_dim, max_positions, rope_length)
        count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        # A window as long as the context is full attention.
        windows = [w if w < rope.max_context else 0 for w in self.windows(fields, count)]
        mlps, tables = self.mlps(fields, layer, count), self.ropes(fields, count)
        description = Description(
            architecture=self.architecture,
            hidden=hidden,
            vocab=fields.integer("vocab_size", 2, MAX_VOCAB),
            max_context=rope.max_context,
            norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
            tied_head=fields.flag("tie_word_embeddings", False),
            rope=rope,
            other_ropes=tuple(others),
            layers=tuple(
                replace(mlp, window=w, rope=t)
                for mlp, w, t in zip(mlps, windows, tables, strict=True)
            ),
        )
        description = self.ends(fields, description)
        fields.finish(fields_read(self.model_type))
        self.unknown_fields = tuple(fields.ignored)
        return description

    def _defaults(self) -> dict[str, Any]:
        """Returns what the reference assumes for absent fields. A config must have its sizes, but
        for those that a wrapping one leaves out, and that of an MLP which may have no layer."""
        fields = fields_read(self.model_type)
        left_out = {*_NAMES_OF_EXPERTS, *(() if self.wrapper else _SIZES)}
        if fields.get("moe_intermediate_size") is not None:
            left_out.discard("intermediate_size")
        return {name: value for name, value in fields.items() if name not in left_out}

    def _kv_heads(self, fields: Fields, heads: int) -> int:
        # Null means multi-head attention, also where the family has another default.
        kv_heads: int = fields.integer("num_key_value_heads", 1, heads, heads)
        if kv_heads > heads or heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        return kv_heads

    def _head_dim(self, fields: Fields, hidden: int, heads: int) -> int:
        given = fields.integer("head_dim", 1, MAX_HEAD_DIM, None)
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
        if model.per_layer:
            yield from self._per_layer_slots(model)
        if not model.tied_head:
            yield "head", whole(f"{self.head}.weight", model.vocab, model.hidden)

    def _layer_slots(self, model: Description, layer: Layer) -> Iterator[tuple[str, list[Rows]]]:
        hidden = model.hidden
        yield "attn_norm", whole(f"{self.attn_norm}.weight", hidden)
        yield "qkv", self.qkv_rows("weight", layer, hidden)
        if layer.qkv_bias:
            yield "qkv_bias", self.qkv_rows("bias", layer)
        if layer.qk_norm:
            yield "q_norm", whole(f"{self.q_norm}.weight", layer.head_dim)
        if layer.qk_norm and layer.kv_layer < 0:
            yield "k_norm", whole(f"{self.k_norm}.weight", layer.head_dim)
        if layer.qk_norm_all:
            yield "q_norm", whole(f"{self.q_norm}.weight", layer.heads * layer.head_dim)
            yield "k_norm", whole(f"{self.k_norm}.weight", layer.kv_heads * layer.head_dim)
        if layer.sinks:
            yield "sinks", whole(self.sinks, layer.heads)
        yield "o", whole(f"{self.o}.weight", hidden, layer.heads * layer.head_dim)
        if layer.o_bias:
            yield "o_bias", whole(f"{self.o}.bias", hidden)
        if layer.post_norms:
            yield "attn_post_norm", whole(f"{self.attn_post_norm}.weight", hidden)
        yield "mlp_norm", whole(f"{self.mlp_norm}.weight", hidden)
        if layer.intermediate:
            yield from self._mlp_slots(layer, hidden)
        if layer.experts is not None:
            yield from self._experts_slots(layer.experts, hidden)
        if layer.post_norms:
            yield "mlp_post_norm", whole(f"{self.mlp_post_norm}.weight", hidden)
        if model.per_layer:
            yield "per_layer_gate", whole(f"{self.per_layer_gate}.weight", model.per_layer, hidden)
            yield "per_layer_out", whole(f"{self.per_layer_out}.weight", hidden, model.per_layer)
            yield "per_layer_post_norm", whole(f"{self.per_layer_post_norm}.weight", hidden)
        if layer.scaled:
            yield "scale", whole(self.scale, 1)

    def _mlp_slots(self, layer: Layer, hidden: int) -> Iterator[tuple[str, list[Rows]]]:
        for slot, rows in self._plain_mlp_slots(layer, hidden):
            yield slot, [replace(r, tensor=self.mlp_tensor(r.tensor, layer)) for r in rows]
        if layer.mlp_gate:
            yield "mlp_gate", whole(f"{self.mlp_gate}.weight", 1, hidden)

    def mlp_tensor(self, name: str, layer: Layer) -> str:
        """Returns the name of an MLP's tensor, which may be another one beside experts."""
        return name

    def _plain_mlp_slots(self, layer: Layer, hidden: int) -> Iterator[tuple[str, list[Rows]]]:
        yield "gate_up", self.gate_up_rows("weight", layer, hidden)
        if layer.mlp_bias:
            yield "gate_up_bias", self.gate_up_rows("bias", layer)
        yield "down", whole(f"{self.down}.weight", hidden, layer.intermediate)
        if layer.mlp_bias:
            yield "down_bias", whole(f"{self.down}.bias", hidden)

    def _experts_slots(self, experts: Experts, hidden: int) -> Iterator[tuple[str, list[Rows]]]:
        yield "router", whole(f"{self.router}.weight", experts.count, hidden)
        if experts.router_bias:
            yield "router_bias", whole(f"{self.router}.bias", experts.count)
        if experts.scaled:
            yield "experts.scale", whole(self.expert_scale, experts.count)
        if experts.own_norms:
            yield "experts.router_norm", whole(self.router_norm, hidden)
            yield "experts.norm", whole(f"{self.experts_norm}.weight", hidden)
            yield "experts.post_norm", whole(f"{self.experts_post_norm}.weight", hidden)
            yield "experts.mlp_post_norm", whole(f"{self.experts_mlp_post_norm}.weight", hidden)
        for j in range(experts.count):
            yield f"experts.{j}.gate_up", self.expert_gate_up_rows(experts, j, hidden)
            yield f"experts.{j}.down", self.expert_down_rows(experts, j, hidden)
            yield from self.expert_bias_slots(experts, j, hidden)

    def _per_layer_slots(self, model: Description) -> Iterator[tuple[str, list[Rows]]]:
        width = len(model.layers) * model.per_layer
        yield "per_layer_embed", whole(f"{self.per_layer_embed}.weight", model.vocab, width)
        yield (
            "per_layer_projection",
            whole(f"{self.per_layer_projection}.weight", width, model.hidden),
        )
        yield "per_layer_norm", whole(f"{self.per_layer_norm}.weight", model.per_layer)

    def qkv_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns the rows of the fused projection: all q heads, then k heads, then v heads; those
        of q alone for a layer that reads the KV of another."""
        q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        rows = whole(f"{self.q}.{kind}", q, *columns)
        if layer.kv_layer < 0:
            rows += whole(f"{self.k}.{kind}", kv, *columns)
            rows += whole(f"{self.k if layer.k_eq_v else self.v}.{kind}", kv, *columns)
        return rows

    def gate_up_rows(self, kind: str, layer: Layer, *columns: int) -> list[Rows]:
        """Returns the rows of the fused projection: all of the gate, then all of up."""
        return [
            *whole(f"{self.gate}.{kind}", layer.intermediate, *columns),
            *whole(f"{self.up}.{kind}", layer.intermediate, *columns),
        ]

    def expert_gate_up_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`: all of its gate, then all of its up."""
        inner = experts.intermediate
        if self.gate_ups:
            return [Rows(self.gate_ups, (experts.count, 2 * inner, hidden), 0, 2 * inner, j)]
        names = (name.replace("{j}", str(j)) for name in (self.expert_gate, self.expert_up))
        return [row for name in names for row in whole(f"{name}.weight", inner, hidden)]

    def expert_down_rows(self, experts: Experts, j: int, hidden: int) -> list[Rows]:
        """Returns the rows of expert `j`."""
        if self.downs:
            shape = (experts.count, hidden, experts.intermediate)
            return [Rows(self.downs, shape, 0, hidden, j)]
        name = f"{self.expert_down}.weight".replace("{j}", str(j))
        return whole(name, hidden, experts.intermediate)

    def expert_bias_slots(
        self, experts: Experts, j: int, hidden: int
    ) -> Iterator[tuple[str, list[Rows]]]:
        """Yields the slots of the biases of expert `j`."""
        yield from ()

    def stored(self, rows: Rows, shape: tuple[int, ...]) -> Rows:
        """Returns `rows` as they are in a checkpoint whose tensor has another shape."""
        return rows

    def ignored_tensor(self, name: str, model: Description) -> bool:
        """Returns whether a tensor is unused and may be ignored: of older checkpoints, or of K and
        V in a layer that reads the KV of another."""
        shared = (i for i, layer in enumerate(model.layers) if layer.kv_layer >= 0)
        of_kv = {m.replace("{i}", str(i)) for i in shared for m in (self.k, self.v, self.k_norm)}
        head = model.tied_head and name == f"{self.head}.weight"
        return name.endswith(_ROTATIONS) or head or name.rpartition(".")[0] in of_kv


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
    window = fields.integer("sliding_window", 1 if on else 0, MAX_CONTEXT, 0)
    first = fields.integer("max_window_layers", 0, 1 << 20, 28)
    return layer_windows(fields, layers, window if on else 0, first)
