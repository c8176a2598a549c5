"""Room for the reply: a default limit is cut to what the context has left, a given one refused."""

from __future__ import annotations

import json

import pytest
from chat_models import chat_model

import lmchat

CONTEXT, DEFAULT = 256, 200
NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "logit_bias": NO_END}
OPTIONS = {"threads": 1, "cache_memory": "32MiB", "store": "memory"}
PHRASE = rf"maximum context length is {CONTEXT} tokens"


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A model with a short context, whose own limit of a reply takes most of it."""
    folder = chat_model(tmp_path_factory.mktemp("limited"), context=CONTEXT)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": DEFAULT}))
    return folder


@pytest.fixture(scope="module")
def engine(limited):
    with lmchat.ChatEngine(limited, device="cpu", **OPTIONS) as engine:
        yield engine


def test_the_models_limit_is_cut_to_the_room(engine):
    chat = engine.session("cut", settings=GREEDY)
    first = chat.send("word " * 30)
    room = CONTEXT - first.usage.prompt_tokens
    assert room < DEFAULT
    assert (len(first.token_ids), first.finish_reason) == (room, "length")
    assert chat.length == CONTEXT
    # The turn stores the limit that applied to it before it was cut.
    assert chat.turns[-1].settings["max_new_tokens"] == DEFAULT
    with pytest.raises(lmchat.ContextFull, match=PHRASE):
        chat.send("more")
    with pytest.raises(lmchat.ContextFull, match=PHRASE):
        chat.continue_()
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]
    assert chat.unanswered is None


def test_a_cut_reply_begins_as_one_with_more_room(engine, limited):
    cut = engine.session("as long", settings=GREEDY).send("word " * 30)
    with lmchat.ChatEngine(limited, device="cpu", **OPTIONS) as other:
        free = other.session(settings={**GREEDY, "max_new_tokens": 20}).send("word " * 30)
    assert cut.token_ids[:20] == free.token_ids


@pytest.mark.parametrize("where", ["call", "session"])
def test_a_given_limit_is_refused_before_anything_is_stored(engine, where):
    chat = engine.session(f"given {where}", settings=GREEDY)
    settings = {}
    if where == "call":
        settings["max_new_tokens"] = 250
    else:
        chat.set(max_new_tokens=250)
    with pytest.raises(lmchat.ContextFull, match=PHRASE) as caught:
        chat.send("word " * 30, **settings)
    prompt = chat.count_tokens("word " * 30)
    most = CONTEXT - prompt
    assert f"max_new_tokens is 250, expected at most {most} after" in str(caught.value)
    assert (chat.turns, chat.unanswered) == ((), None)
    reply = chat.send("word " * 30, max_new_tokens=most)  # what it names does fit
    assert len(reply.token_ids) == most


def test_a_least_length_beyond_the_room_is_refused(engine):
    chat = engine.session("least", settings=GREEDY)
    with pytest.raises(lmchat.ContextFull, match="min_new_tokens is 199, expected at most"):
        chat.send("word " * 30, min_new_tokens=199)
    assert chat.turns == ()


def test_rounds_are_dropped_until_the_whole_limit_fits(engine):
    chat = engine.session("drop", settings=GREEDY, overflow="drop")
    for _ in range(3):  # each is short, but these rounds and a whole reply do not fit
        chat.send("a", max_new_tokens=8)
    reply = chat.send("b")
    assert len(reply.token_ids) == DEFAULT
    assert "dropped" in reply.notices[0]


def test_rounds_stay_where_the_limit_never_fits(engine):
    """With a limit that no turn has room for, dropping everything would not help."""
    chat = engine.session("stay", settings=GREEDY, overflow="drop")
    chat.send("word " * 6, max_new_tokens=8)
    reply = chat.send("word " * 22)
    assert reply.notices == ()
    assert len(reply.token_ids) == CONTEXT - reply.usage.prompt_tokens < DEFAULT
    reply = chat.send("word " * 22)
    assert "dropped" in reply.notices[0]
    assert len(reply.token_ids) >= CONTEXT // 2


def test_requests_without_a_session_have_one_rule(engine):
    prompt = "word " * 30
    ids = engine.tokenizer.encode(prompt)
    assert engine.generate(prompt, **GREEDY).usage.completion_tokens == CONTEXT - len(ids)
    with pytest.raises(lmchat.ContextFull, match=PHRASE) as caught:
        engine.generate(prompt, max_new_tokens=CONTEXT, **GREEDY)
    assert f"expected at most {CONTEXT - len(ids)} after" in str(caught.value)
    messages = [{"role": "user", "content": prompt}]
    reply = engine.chat(messages, **GREEDY)
    assert reply.usage.completion_tokens == CONTEXT - reply.usage.prompt_tokens
    with pytest.raises(lmchat.ContextFull, match=PHRASE):
        engine.chat(messages, max_new_tokens=CONTEXT, **GREEDY)
    for refused in (engine.generate, engine.score):
        with pytest.raises(lmchat.ContextFull, match=PHRASE):
            refused("word " * 400)


def test_the_core_names_the_context_too(engine):
    with pytest.raises(lmchat.ContextFull, match=PHRASE):
        engine.core.generate([5] * 200, max_new_tokens=57, temperature=0.0)
