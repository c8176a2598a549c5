"""A session continues on any number of ranks with the KV that others have computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chat_models import chat_model

import lmchat

pytestmark = pytest.mark.cpu_only("test_gpu_pages.py has engines on GPUs")

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "logit_bias": {0: -100.0, 2: -100.0}}
TEXTS = [
    "Plan a day in Kyoto, and one with children in Nara. " * 4,
    "How many tokens does this sentence have?",
    "What is 345 + 678?",
    "One more.",
]


def chat(folder: Path, degrees: Sequence[int], home: Path) -> list[lmchat.Reply]:
    """Sends a text to one session by an engine of each degree, one after the other."""
    replies = []
    for tp, text in zip(degrees, TEXTS, strict=True):
        options = {"threads": 2, "cache_memory": "16MiB", "store": home}
        with lmchat.ChatEngine(folder, tp=tp, **options) as engine:
            replies.append(engine.session("trip").send(text, **GREEDY))
    return replies


def test_a_session_goes_through_several_numbers_of_ranks(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    stayed = chat(folder, (1, 1, 1, 1), tmp_path / "stayed")
    moved = chat(folder, (1, 2, 4, 1), tmp_path / "moved")
    # float32 differs between degrees by less than what decides a token.
    assert [reply.text for reply in moved] == [reply.text for reply in stayed]
    for here, there in zip(moved, stayed, strict=True):
        assert here.usage.prompt_tokens == there.usage.prompt_tokens
        assert here.usage.cached_tokens == there.usage.cached_tokens
    assert [reply.usage.foreign_tokens for reply in stayed] == [0, 0, 0, 0]
    for number, reply in enumerate(moved[1:3]):
        assert reply.usage.foreign_tokens == reply.usage.cached_tokens > 64 * (number + 1)
    # The last one meets its own pages of the first turn again, and those of others.
    last = moved[3].usage
    assert 0 < last.foreign_tokens < last.cached_tokens


def test_exact_computes_what_other_ranks_have_computed_again(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    options = {"threads": 2, "cache_memory": "16MiB"}
    with lmchat.ChatEngine(folder, tp=1, **options) as engine:
        engine.session("a").send(TEXTS[0], **GREEDY)
    with lmchat.ChatEngine(folder, tp=2, **options) as engine:
        session = engine.session("a")
        assert session.send(TEXTS[1], **GREEDY).usage.foreign_tokens > 0
        assert session.retry(exact=True).usage.foreign_tokens == 0
