"""Sessions of a model with windows, which have fewer pages than full attention has."""

from __future__ import annotations

import functools
import json

import pytest
from chat_models import chat_model

import lmchat
from lmchat.page_size import PAGE_TOKENS as PAGE

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "logit_bias": NO_END}
# 80 pages of full attention, 30 or so of windows; what is not on the device is computed again.
OPTIONS = {
    "threads": 1,
    "load_format": "dummy",
    "cache_pages": 80,
    "max_batch_size": 6,
    "prefill_chunk": 128,
    "persist_pages": False,
    "store": "memory",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Gemma 3 with one layer of full attention between two with windows of 100 tokens."""
    path = chat_model(tmp_path_factory.mktemp("windows"))
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "sliding_window": 100,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
    }
    del config["hidden_act"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def prefilled(engine, act):
    """Returns what `act` returns and the prompt tokens that it computed."""
    before = engine.stats().tokens_prefilled
    found = act()
    return found, engine.stats().tokens_prefilled - before


def test_the_last_turn_again_computes_at_most_a_page_of_old_tokens(folder, device):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        full, window = sorted(engine.stats().groups, key=lambda group: -group.total)
        assert (full.window, full.total, window.window) == (0, 80, 100)
        assert window.total < 40
        chat, other = (engine.session(name, settings=GREEDY) for name in ("trip", "other"))

        def others_talk():
            other.send("One, two. " * 5, max_new_tokens=150)
            engine.core.check_invariants()

        chat.send("Plan a day. " * 20, max_new_tokens=90)
        for number in range(2):
            begin = chat.length
            chat.send("And one with children? " * 8, max_new_tokens=350)
            others_talk()
            _, again = prefilled(engine, lambda: chat.retry(max_new_tokens=380))
            assert again <= PAGE
            others_talk()
            edit = functools.partial(chat.edit, number + 1, "In winter? " * 9, max_new_tokens=360)
            _, again = prefilled(engine, edit)
            assert again <= PAGE + chat.turns[-1].usage.prompt_tokens - begin
            others_talk()
            chat.undo()
            assert chat.length == begin
            _, again = prefilled(engine, lambda: chat.send("In May?", max_new_tokens=300))
            assert again <= PAGE + chat.turns[-1].usage.prompt_tokens - begin
            others_talk()
        stats = engine.stats()
        assert stats.tokens_recomputed == 0
        for group in stats.groups:
            assert group.free + group.referenced + group.cached == group.total


def test_replies_are_those_of_a_large_cache(folder, device):
    def replies(**options):
        with lmchat.ChatEngine(folder, device=device, **{**OPTIONS, **options}) as engine:
            chat = engine.session("trip", settings=GREEDY)
            return [
                chat.send("Plan a day. " * 20, max_new_tokens=60).text,
                chat.send("And one with children?", max_new_tokens=150).text,
                chat.retry(max_new_tokens=150).text,
                chat.edit(1, "In winter?", max_new_tokens=150).text,
            ]

    assert replies() == replies(cache_pages=4000, max_batch_size=16)
