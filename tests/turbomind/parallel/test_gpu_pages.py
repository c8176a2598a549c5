"""KV pages of a model on several emulated GPUs: tiers store them for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Zoo, prompt

from turbomind import Engine

pytestmark = pytest.mark.cpu_only("on emulated GPUs")

PLACES = [("cuda_emulated", 2), ("cuda_emulated", 4), ("cpu", 2), ("cuda_emulated", 2)]


def logprobs(reply: Any, vocab: int) -> np.ndarray:
    """Returns the log-probabilities of the first token, all of them."""
    row = np.empty(vocab)
    for token, logprob in reply.logprobs[0].top:
        row[token] = logprob
    return row


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3"])  # one cache group, and two
@pytest.mark.parametrize("host_memory", [None, "4MiB"], ids=["disk", "host"])
def test_a_session_moves_between_numbers_of_gpus(
    name: str, host_memory: str | None, tmp_path: Path, zoo: Zoo
) -> None:
    """All its KV is loaded, and as good as that computed in place, up to bfloat16 rounding."""
    folder = zoo.folder(name)
    tokens: list[int] = []
    options: dict[str, Any] = {"dtype": "bfloat16", "threads": 2, "cache_memory": "8MiB"}
    for at, (device, tp) in enumerate(PLACES):
        before = len(tokens)
        options |= {"device": device, "tp": tp}
        tiers: dict[str, Any] = {"page_folder": tmp_path / "pages", "host_memory": host_memory}
        with Engine(folder, **options, **tiers) as engine:
            vocab = engine.vocab_size
            tokens += prompt(150 if at == 0 else 20, vocab, seed=at)
            params: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0, "logprobs": vocab}
            with engine.open(persist=True).advance(0, tokens, **params, ignore_eos=True) as stream:
                reply = stream.result()
        assert reply.loaded_tokens == max(before - 1, 0), (device, tp)
        got = logprobs(reply, vocab)
        with Engine(folder, **options) as cold:
            want = logprobs(cold.generate(tokens, **params), vocab)
        assert np.std(got - want) < 0.02 * np.std(want), (device, tp)
        tokens += reply.token_ids
