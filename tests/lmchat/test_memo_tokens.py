"""The model that ships gives the recorded tokens."""

import compatibility
import pytest

import lmchat


@pytest.mark.cpu_only("tokens were recorded on the CPU")
def test_greedy_replies_of_memo_are_the_recorded_tokens():
    recorded = compatibility.expected("memo.json")
    options = {"store": "memory", "dtype": "float32", "isa": "portable", "threads": 1}
    with lmchat.ChatEngine(**options) as engine:
        chat = engine.session()
        for text, ids in zip(recorded["messages"], recorded["replies"], strict=True):
            reply = chat.send(text, temperature=0.0, max_new_tokens=40)
            assert list(reply.token_ids) == ids, text
