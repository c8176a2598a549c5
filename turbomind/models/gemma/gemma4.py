"""Gemma 4: layers of full attention have other heads than those with a window, the last layers may
read the KV of earlier ones, the small models have per-layer inputs, and one has experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turbomind.models.base import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from turbomind.models.config import Fields
from turbomind.models.description import Description, Layer
from turbomind.models.experts.fields import read_experts
from turbomind.models.gemma.gemma2 import GGUF_NORMS, Gemma2
from turbomind.models.gemma.gemma4_gguf import complete
from turbomind.models.gemma.gemma4_layers import full_heads, with_full_heads, with_shared_kv
from turbomind.models.gguf import DIVISORS, EXPERT_WIDTH, WINDOW, Architecture
from turbomind.models.rope import PROPORTIONAL, Rope, RopeRules, read_rope
from turbomind.models.wrapper import Wrapper

_FULL, _LOCAL = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4(Gemma2):
    """Scores are not scaled, and V is normed. Experts are beside the MLP of all layers or none."""

    names = {"Gemma4ForCausalLM": "gemma4_text"}
    wrappers = {"Gemma4ForConditionalGeneration": Wrapper("gemma4", "gemma4_text")}
    gguf = {
        "gemma4": Architecture(
            "Gemma4ForCausalLM",
            fields=WINDOW
            | EXPERT_WIDTH
            | {
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "final_logit_softcapping": "final_logit_softcapping",
                "expert_used_count": "top_k_experts",
            },
            names=GGUF_NORMS,
            tables=(DIVISORS,),
            complete=complete,
        )
    }
    rope_rules = RopeRules(types={name: name for name in ("default", PROPORTIONAL)})
    scale = "model.layers.{i}.layer_scalar"
    per_layer_embed = "model.embed_tokens_per_layer"
    per_layer_projection = "model.per_layer_model_projection"
    per_layer_norm = "model.per_layer_projection_norm"
    per_layer_gate = "model.layers.{i}.per_layer_input_gate"
    per_layer_out = "model.layers.{i}.per_layer_projection"
    per_layer_post_norm = "model.layers.{i}.post_per_layer_input_norm"
    router = "model.layers.{i}.router.proj"
    gate_ups = "model.layers.{i}.experts.gate_up_proj"
    downs = "model.layers.{i}.experts.down_proj"
    router_norm = "model.layers.{i}.router.scale"
    expert_scale = "model.layers.{i}.router.per_expert_scale"
    experts_norm = "model.layers.{i}.pre_feedforward_layernorm_2"
    experts_post_norm = "model.layers.{i}.post_feedforward_layernorm_2"
    experts_mlp_post_norm = "model.layers.{i}.post_feedforward_layernorm_1"

    def traits(self, fields: Fields, layer: Layer) -> Layer:
        """Reads the bias flag, and refuses attention in both directions."""
        if fields.raw("use_bidirectional_attention") is not None:
            fields.choice("use_bidirectional_attention", ("vision",))  # changes nothing for text
        bias = fields.flag("attention_bias", False)
        layer = replace(layer, qkv_bias=bias, o_bias=bias, attn_scale=1.0, qk_norm=True)
        return replace(layer, v_norm=True, post_norms=True, scaled=True)

    def mlps(self, fields: Fields, layer: Layer, layers: int) -> list[Layer]:
        """Returns the MLP for all layers, with the experts beside it if `enable_moe_block`."""
        if fields.flag("enable_moe_block", False):
            experts = read_experts(fields, None, "moe_intermediate_size", True, "top_k_experts")
            layer = replace(layer, experts=replace(experts, scaled=True, own_norms=True))
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.raw(name)  # not used without that flag
        return [layer] * layers

    def windows(self, fields: Fields, layers: int) -> list[int]:
        """Reads `layer_types`, else every sixth layer is full; the last one always is."""
        return [*self._windows(fields, layers, 6)[:-1], 0]

    def ropes(self, fields: Fields, layers: int) -> list[int]:
        """Returns table 1 for layers with a window."""
        return [1 if window else 0 for window in self.windows(fields, layers)]

    def rope_tables(
        self, fields: Fields, head_dim: int, max_positions: int, length: int | None
    ) -> list[Rope]:
        """Reads the tables of layers with full attention and of those with a window."""
        tables = fields.raw("rope_parameters") or _ROPES
        if not isinstance(tables, dict) or not tables.keys() <= _ROPES.keys():
            raise fields.error("rope_parameters", f"an object of {_FULL!r} and {_LOCAL!r}")
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        full_dim, _ = full_heads(fields, self.windows(fields, layers), 1)
        found = []
        for kind, dim, kept in ((_FULL, full_dim, length), (_LOCAL, head_dim, None)):
            values = {"rope_parameters": tables.get(kind) or _ROPES[kind]}
            own = Fields(values, ignored=fields.ignored)
            found.append(read_rope(own, self.rope_rules, dim, max_positions, kept))
        return found

    def ends(self, fields: Fields, model: Description) -> Description:
        """Reads what differs between layers, and the per-layer inputs."""
        windows = self.windows(fields, len(model.layers))
        layers = with_full_heads(fields, model.layers, windows)
        layers = with_shared_kv(fields, layers, windows)
        model = replace(super().ends(fields, model), layers=layers, norm_offset=0.0)
        return replace(model, per_layer=self._per_layer(fields, model.vocab))

    def _per_layer(self, fields: Fields, vocab: int) -> int:
        width: int = fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 0)
        rows = fields.integer("vocab_size_per_layer_input", 1, MAX_VOCAB, vocab)
        if width and rows != vocab:
            raise fields.error("vocab_size_per_layer_input", f"vocab_size, {vocab}")
        return width
