"""Layers that read the KV of earlier ones: a step computes them for the sampled tokens alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import turbomind

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "global_head_dim": 40,
    "hidden_size_per_layer_input": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 3,
    "sliding_window": 40,
    "use_double_wide_mlp": True,
    "vocab_size": 200,
    "vocab_size_per_layer_input": 200,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def open_engine(folder: Path, **options: Any) -> turbomind.Engine:
    defaults: dict[str, Any] = {
        "device": "cpu", "threads": 2, "cache_memory": "64MiB", "load_format": "dummy",
        "prefill_chunk": 512,
    }  # fmt: skip
    return turbomind.Engine(folder, **{**defaults, **options})


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 200, length).tolist()


@pytest.mark.cpu_only("a GPU computes these layers for all tokens")
def test_layers_after_the_last_kv_see_the_sampled_tokens_alone(folder: Path) -> None:
    with open_engine(folder, warm_up=False) as engine:
        engine.profile()
        engine.generate(prompt(200), max_new_tokens=1)
        ops = engine.stats().ops
    # The MLP of the first layer sees all tokens. The second layer is the last one that writes KV.
    tokens = 200 * 208 + 208 + 3 * 2 * 208  # times widths
    assert ops["gate_up"]["flops"] == 2 * 96 * 2 * tokens


@pytest.mark.cpu_only("a GPU computes these layers for all tokens")
def test_results_have_the_bits_of_all_tokens(folder: Path) -> None:
    """`logits` samples every token, `score` all but the last, a reply the last of each prompt."""
    ids = prompt(150)
    with open_engine(folder) as engine:
        logits = engine.logits(ids).astype(np.float64)
        scores = engine.score(ids)
        reply = engine.generate(ids, max_new_tokens=1, temperature=0, logprobs=engine.vocab_size)
    top = logits.max(axis=1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores, logprobs[np.arange(149), ids[1:]], atol=1e-5)
    assert reply.logprobs is not None
    last = [value for _, value in sorted(reply.logprobs[0].top)]
    np.testing.assert_allclose(last, logprobs[-1], atol=1e-5)
    with open_engine(folder, prefill_chunk=1, threads=1) as engine:  # no token is left out
        assert np.array_equal(engine.logits(ids), logits.astype(np.float32))
        assert engine.score(ids) == scores
        alone = engine.generate(ids, max_new_tokens=1, temperature=0, logprobs=engine.vocab_size)
        assert alone.logprobs == reply.logprobs
