"""Shapes of the compared models: public facts of their architectures, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A decoder-only model with gated feed-forward layers and a tied head.

    Widths are in elements. `hf` holds the fields of config.json beyond these.
    """

    name: str
    architecture: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool
    hf: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **self.hf,
        }

    def layer_products(self) -> dict[str, tuple[int, int]]:
        """Returns the matrix products of one layer: name -> (outputs n, inputs k), fused."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of checkpoint tensors by name; projections are [outputs, inputs]."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden, queries)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        return shapes

    def layer_weights(self) -> int:
        """Returns the number of elements of all layers' matrices."""
        return self.layers * sum(n * k for n, k in self.layer_products().values())

    def decode_weight_bytes(self) -> int:
        """Returns the bytes of 16-bit weights that a decode step reads, head included."""
        return BF16_BYTES * (self.layer_weights() + self.vocab * self.hidden)

    def kv_bytes_per_token(self) -> int:
        """Returns the bytes of 16-bit K and V of one token in all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, tokens: int) -> int:
        """Returns the FLOPs of a prefill: layers, causal attention, the head of the last row."""
        products = 2 * tokens * self.layer_weights()
        pairs = tokens * (tokens + 1) // 2
        attention = 4 * pairs * self.layers * self.heads * self.head_dim
        return products + attention + 2 * self.vocab * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="qwen2.5-0.5b",
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            layers=24,
            hidden=896,
            intermediate=4864,
            heads=14,
            kv_heads=2,
            head_dim=64,
            vocab=151936,
            max_context=32768,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            qkv_bias=True,
            hf={
                "bos_token_id": 151643,
                "eos_token_id": 151643,
                "max_window_layers": 24,
                "sliding_window": 32768,
                "use_sliding_window": False,
            },
        ),
        Shape(
            name="llama-3.2-1b",
            architecture="LlamaForCausalLM",
            model_type="llama",
            layers=16,
            hidden=2048,
            intermediate=8192,
            heads=32,
            kv_heads=8,
            head_dim=64,
            vocab=128256,
            max_context=131072,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            qkv_bias=False,
            hf={
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "head_dim": 64,
                "attention_bias": False,
                "mlp_bias": False,
                "rope_scaling": {
                    "factor": 32.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                },
            },
        ),
    )
}
