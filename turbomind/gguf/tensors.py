"""The tensors of a GGUF file that fill the core's weight slots.

Files have names of their own, stack the matrices of a layer's experts, and have gates and ups apart
or fused; early ones have a tensor per expert. llama.cpp's src/llama-arch.cpp defines the names.
"""

from __future__ import annotations

import re
from dataclasses import replace

from turbomind.gguf.fields import ENCODER_TENSORS, architecture_of
from turbomind.gguf.file import GgufFile
from turbomind.models import Description, Family, Rows
from turbomind.models.description import ZEROS

# Name in a checkpoint of a hub -> name in a file, of modules or, where a kind follows, of tensors.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERT_SLOT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate_up|down)(_bias)?")


def slots_of(file: GgufFile, family: Family, model: Description) -> list[tuple[str, list[Rows]]]:
    """Returns the slots of a family with the rows of the file's tensors that fill them."""
    slots = []
    for slot, rows in family.slots(model):
        expert = _EXPERT_SLOT.fullmatch(slot)
        if expert is not None:
            layer, index, kind, bias = expert.groups()
            found = _expert_rows(file, model, int(layer), int(index), kind, bool(bias))
        else:
            found = [_renamed(file, row) for row in rows]
        slots.append((slot, found))
    return slots


def tensor_name(file: GgufFile, name: str) -> str:
    """Returns the name that a tensor of a checkpoint has in the file, as "blk.0.attn_q.weight"."""
    names = {**NAMES, **architecture_of(file).names}
    layer = _LAYER.fullmatch(name)
    prefix, rest = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
    if rest in names:
        return prefix + names[rest]
    module, kind = rest.rsplit(".", 1)
    return f"{prefix}{names[module]}.{kind}"


def unneeded(file: GgufFile, model: Description) -> set[str]:
    """Returns the names of tensors without a slot: those that the description has read, K and V of
    layers that read the KV of another, encoders, and layers that only draft tokens."""
    shared = [i for i, layer in enumerate(model.layers) if layer.kv_layer >= 0]
    kinds = ("attn_k", "attn_v", "attn_k_norm")
    names = {f"blk.{i}.{kind}.weight" for i in shared for kind in kinds}
    names |= {name for name in file.tensors if name.startswith(tuple(ENCODER_TENSORS))}
    count = len(model.layers)
    names |= {n for n in file.tensors if (m := _BLOCK.match(n)) and int(m[1]) >= count}
    return names | set(architecture_of(file).tables)


def _renamed(file: GgufFile, row: Rows) -> Rows:
    row = replace(row, tensor=tensor_name(file, row.tensor))
    stored = file.tensors.get(row.tensor)
    if stored is None and row.tensor.endswith(".bias"):
        return replace(row, tensor=ZEROS)
    if stored is not None and row.shape == (1, *stored.shape):  # converters drop the axis
        return replace(row, shape=stored.shape, transposed=True)
    return row


def _expert_rows(
    file: GgufFile, model: Description, layer: int, index: int, kind: str, bias: bool
) -> list[Rows]:
    """Returns the rows of a matrix, or of a bias, of one expert."""
    experts = model.layers[layer].experts
    assert experts is not None
    inner, hidden = experts.intermediate, model.hidden
    width = () if bias else (inner if kind == "down" else hidden,)
    prefix, end = f"blk.{layer}.ffn_", "bias" if bias else "weight"
    heights = {"gate_up": 2 * inner, "down": hidden}
    if f"{prefix}{kind}_exps.{end}" not in file.tensors and kind == "gate_up":
        heights = {"gate": inner, "up": inner}
    else:
        heights = {kind: heights[kind]}
    rows = []
    for part, height in heights.items():
        shape, single = (height, *width), f"{prefix}{part}.{index}.{end}"
        if single in file.tensors:
            rows.append(Rows(single, shape, 0, height))
        else:
            stacked = f"{prefix}{part}_exps.{end}"
            rows.append(Rows(stacked, (experts.count, *shape), 0, height, index))
    return rows
