"""Makes small random models with the reference library and saves them as on a hub."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# name -> (family, config). Odd on purpose: 1 and 3 KV heads, head_dim 40, 80 and 96, vocabularies
# and widths that are not multiples of a tile, windows shorter than the prompt, rotations scaled
# past their original length.
SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# Of the smallest encoder of images.
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 1,
    "patch_size": 2,
    "image_size": 4,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


GEMMA4: dict[str, Any] = {
    "head_dim": 24,
    "global_head_dim": 40,
    "sliding_window": 33,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": SMALL["vocab_size"],
}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "vocab_size": 97}),
    "llama_gqa": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama_gqa_biases_tied": (
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 40,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "intermediate_size": 100,
        },
    ),
    "llama_mqa_80": (
        "Llama",
        {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 80},
    ),
    "llama_96": (
        "Llama",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96, "vocab_size": 515},
    ),
    "llama_linear": (
        "Llama",
        {"max_position_embeddings": 64, "rope_parameters": _rope("linear", factor=2.5)},
    ),
    "llama_llama3": (
        "Llama",
        {
            "rope_parameters": _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
    ),
    "llama_yarn": (
        "Llama",
        {
            "max_position_embeddings": 256,
            "rope_parameters": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
        },
    ),
    "llama_yarn_all": (
        "Llama",
        {
            "head_dim": 48,
            "rope_parameters": _rope(
                "yarn",
                factor=6.0,
                original_max_position_embeddings=48,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.8,
                mscale_all_dim=0.5,
                truncate=False,
            ),
        },
    ),
    "llama_dynamic": (
        "Llama",
        {"max_position_embeddings": 160, "rope_parameters": _rope("dynamic", factor=2.0)},
    ),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral_window": ("Mistral", {"sliding_window": 20}),
    "mistral_window_page": ("Mistral", {"sliding_window": 64, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2_window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
            "hidden_size": 56,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_bias_window": (
        "Qwen3",
        {
            "head_dim": 80,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 50,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 72,
        },
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 4, "intermediate_size": 100, "sliding_window": 40}),
    "phi3_longrope": (
        "Phi3",
        {
            "hidden_size": 128,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 48,
            "rope_parameters": _rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0 + 0.01 * i for i in range(12)],
                long_factor=[1.1 + 1.5 * i for i in range(12)],
            ),
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "attention_bias": True, "mlp_bias": True}),
    "smollm3_window": (
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 50,
            "tie_word_embeddings": False,
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.11,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 24, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "sliding_window": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2_no_caps": (
        "Gemma2",
        {"head_dim": 40, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 30,
            "sliding_window": 33,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    # Those that a GGUF file can stand for: without a scale of q k of their own.
    "gemma2_file": (
        "Gemma2",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 24,
            "sliding_window": 40,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_file": (
        "Gemma3",
        {
            "head_dim": 24,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 24,
            "sliding_window": 33,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_wrapped": (
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": True,
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_shared": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": 2 * ["sliding_attention", "full_attention"] + ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "tie_word_embeddings": True,
            "vision_config": VISION
            | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16},
        },
    ),
    "gemma4_per_layer": (
        "Gemma4",
        GEMMA4
        | {"hidden_size_per_layer_input": 24, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma4_moe": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": 2 * ["sliding_attention"] + ["full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {name: value for name, value in GEMMA4.items() if "per_layer" not in name}
        | {"num_kv_shared_layers": 2, "num_hidden_layers": 8, "layer_types": None},
    ),
    "mistral3": (
        "Mistral3",
        {
            "head_dim": 24,
            "sliding_window": None,
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "rope_parameters": _rope("default", mrope_section=[2, 3, 3]),
            "vision_config": VISION | {"out_hidden_size": 64},
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe_window": (
        "Qwen3Moe",
        {
            "head_dim": 40,
            "decoder_sparse_step": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 33,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 50,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe_file": (  # as a GGUF file can have it: experts in all layers
        "Qwen2Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen2_moe_window": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 33,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 50,
            "max_window_layers": 2,
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 84,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "granite_moe": (
        "GraniteMoe",
        {
            "intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attention_multiplier": 0.11,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "rope_parameters": _rope("default", mrope_section=[4, 4, 4], mrope_interleaved=True),
            "vision_config": VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "intermediate_size": 44,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 30,
            "initializer_range": 0.35,  # so that gates and ups are cut
            "rope_parameters": _rope(
                "yarn", factor=4.0, original_max_position_embeddings=128, truncate=False
            ),
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            "intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _rope("default", mrope_section=[4, 4, 4], mrope_interleaved=True),
            "vision_config": VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        },
    ),
}  # fmt: skip


@dataclass
class Zoo:
    """Makes each checkpoint once. `model()` is the reference model, in float32 and eager."""

    root: Path
    _models: dict[str, Any] = field(default_factory=dict)

    def model(self, name: str) -> Any:
        """Returns the reference model of that name. Its weights fit bfloat16 exactly."""
        if name not in self._models:
            self._models[name] = make_model(*MODELS[name])
        return self._models[name]

    def folder(self, name: str, dtype: str = "float32", shard: str = "5GB") -> Path:
        """Returns a folder with the model in `dtype`, in shards of that size."""
        import torch

        folder = self.root / f"{name}-{dtype}-{shard}"
        if not folder.exists():
            # A copy: casting a model rounds its rotary table, and casting it back does not help.
            model = copy.deepcopy(self.model(name)).to(getattr(torch, dtype))
            model.save_pretrained(folder, max_shard_size=shard)
        return folder

    def internlm2(self, name: str) -> Path:
        """Returns an InternLM2 checkpoint with the weights of the Llama of that name."""
        folder = self.root / f"{name}-internlm2"
        if not folder.exists():
            save_as_internlm2(self.model(name), folder)
        return folder


def make_config(family: str, changes: dict[str, Any]) -> Any:
    """Returns the reference's config; with a `vision_config` among the changes, that of a wrapper
    whose language model has the others."""
    import transformers

    fields = {**SMALL, "initializer_range": 0.2, **changes}
    vision = fields.pop("vision_config", None)
    kind = getattr(transformers, f"{family}Config")
    if vision is None:
        kind = getattr(transformers, f"{family}TextConfig", kind)
    tied = fields.pop("tie_word_embeddings", kind.tie_word_embeddings and vision is None)
    if vision is None:
        config = kind(**fields, tie_word_embeddings=tied)
    else:
        config = kind(text_config=fields, vision_config=vision, tie_word_embeddings=tied)
    config.architectures = [
        f"{family}For{'CausalLM' if vision is None else 'ConditionalGeneration'}"
    ]
    return config


def make_model(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """Returns a random model in which each parameter has an effect."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = make_config(family, changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # others ask for widths of multiples of 16 bytes
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif name.endswith("sinks"):
                parameter.normal_(1, 1)
            elif "norm" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            parameter.copy_(parameter.to(torch.bfloat16))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5).copy_(buffer.to(torch.bfloat16))
    return model


def rounded(model: Any, dtype: str) -> Any:
    """Returns a copy of the reference that computes in a 16-bit type.

    torch rounds every intermediate result to that type on any processor, so the copy's error
    against float32 is a yardstick that does not depend on the machine. Rotary tables stay float32,
    as in a model that is loaded in that type.
    """
    import torch

    copied = copy.deepcopy(model).to(getattr(torch, dtype))
    tables = dict(model.named_buffers())
    for name, table in copied.named_buffers():
        table.data = tables[name].clone()
    return copied


def reference_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """Returns the reference's logits [len, vocab] as float32."""
    import torch

    with torch.no_grad():
        # Hidden states are asked for because without them transformers 5.23 fails where layers of
        # a Gemma 4 share KV and none has an input of its own.
        output = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
        logits = output.logits[0]
    return logits.to(torch.float32).numpy()


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the root mean square of the difference over that of `theirs`."""
    return float(np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)))


def vocab(model: Any) -> int:
    """Returns the number of ids of a reference model, which may be a wrapper."""
    size: int = model.config.get_text_config().vocab_size
    return size


def prompt(length: int, vocab: int, seed: int = 1) -> list[int]:
    """Returns random token ids without the special ones."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab, length)]


def save_as_internlm2(llama: Any, folder: Path) -> None:
    """Renames and fuses a Llama's tensors, as the InternLM2 modelling code splits them."""
    import torch
    from safetensors.torch import save_file

    c = llama.config
    group, dim = c.num_attention_heads // c.num_key_value_heads, c.head_dim
    old = llama.state_dict()
    new = {
        "model.tok_embeddings.weight": old["model.embed_tokens.weight"],
        "model.norm.weight": old["model.norm.weight"],
        "output.weight": old["lm_head.weight"],
    }
    names = {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    for i in range(c.num_hidden_layers):
        for kind in ("weight", "bias") if c.attention_bias else ("weight",):
            q, k, v = (old[f"model.layers.{i}.self_attn.{p}_proj.{kind}"] for p in "qkv")
            rest = q.shape[1:]
            parts = (
                q.view(c.num_key_value_heads, group, dim, *rest),
                k.view(c.num_key_value_heads, 1, dim, *rest),
                v.view(c.num_key_value_heads, 1, dim, *rest),
            )
            fused = torch.cat(parts, dim=1).reshape(-1, *rest)
            new[f"model.layers.{i}.attention.wqkv.{kind}"] = fused
            for theirs, ours in names.items():
                name = f"model.layers.{i}.{theirs}.{kind}"
                if name in old:
                    new[f"model.layers.{i}.{ours}.{kind}"] = old[name]
    folder.mkdir()
    save_file({k: t.clone().contiguous() for k, t in new.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "model_type": "internlm2",
        "bias": c.attention_bias,
        "hidden_act": "silu",
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "float32",
    }
    for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "bos_token_id", "eos_token_id",
    ):  # fmt: skip
        config[key] = getattr(c, key)
    (folder / "config.json").write_text(json.dumps(config))


TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 70,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
TINY_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (70, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (48, 32),
    "model.layers.0.mlp.up_proj.weight": (48, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 48),
    "model.norm.weight": (32,),
}


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns float32 weights of the TINY config."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in TINY_SHAPES.items()
    }


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], changes: dict[str, Any] | None = None, pad: int = 0
) -> None:
    """Writes float32 safetensors. `changes` replaces header entries, `pad` shifts the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    header.update(changes or {})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_tiny(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a complete folder of the TINY model and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **(config or {})}))
    write_safetensors(folder / "model.safetensors", tensors or tiny_tensors())
    return folder
