"""The models of the end-to-end figures, as shapes: published sizes, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.shapes import SHAPES, Shape

# Contexts are longer than the published 8,192 or 32,768 of the first two: no other size depends on
# them, and histories of 8,192 tokens need room for new ones.
LLAMA_8B = Shape(
    name="llama-3-8b",
    architecture="LlamaForCausalLM",
    model_type="llama",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    max_context=32768,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    qkv_bias=False,
    hf={
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
)
QWEN_7B = Shape(
    name="qwen2.5-7b",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152064,
    max_context=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    qkv_bias=True,
    hf={
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
)
TINY = Shape(
    name="tiny",
    architecture="LlamaForCausalLM",
    model_type="llama",
    layers=1,
    hidden=64,
    intermediate=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=128,
    max_context=512,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    qkv_bias=False,
    hf={"bos_token_id": 1, "eos_token_id": 2, "attention_bias": False},
)

MODELS = {shape.name: shape for shape in (LLAMA_8B, SHAPES["llama-3.2-1b"], QWEN_7B, TINY)}


def write_config(shape: Shape, folder: Path) -> Path:
    """Writes the model's config.json and returns its path."""
    path = folder / shape.name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shape.config(), indent=1) + "\n")
    return path
