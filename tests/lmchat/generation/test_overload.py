"""Requests above the capacity of an engine: preemption, shares, and refusals before any write."""

import contextlib

import pytest
from pace import slow_steps

import lmchat

GREEDY = {"temperature": 0.0}
LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture
def engine():
    options = {"max_batch_size": 2, "max_queue": 2, "threads": 1}
    with lmchat.ChatEngine("memo", store="memory", **options) as engine, slow_steps():
        yield engine


def begun(engine, **options):
    """Starts a long reply without a session and returns its stream after the first text."""
    stream = engine.stream("Tell me", **{**LONG, **options})
    next(stream)
    return stream


def test_a_live_turn_passes_long_replies_which_then_continue_alike(engine):
    alone = engine.generate("Tell me", **LONG)
    chat = engine.session(owner="other")
    chat.send("Hello", **GREEDY)
    streams = [begun(engine), begun(engine)]
    waiting = [engine.start_generate("Wait", **LONG) for _ in range(2)]
    before = engine.stats()
    assert chat.send("And now?", **GREEDY).text
    assert engine.stats().preemptions > before.preemptions
    assert not any(generation.done for generation in waiting)
    replies = [stream.result() for stream in streams]
    assert [reply.token_ids for reply in replies] == [alone.token_ids] * 2
    assert engine.stats().tokens_recomputed == 0
    for generation in waiting:
        generation.cancel()
        generation.wait()
    stats = engine.queue_stats()
    assert (stats.running, stats.paused, stats.waiting) == (0, 0, 0)
    assert stats.preempted_for_share >= 1


def test_short_chats_of_one_template_are_not_live(engine):
    """They share the template's first tokens only. The queue bounds them; a second turn is live."""
    messages = [{"role": "user", "content": "Hello"}]
    reply = engine.chat(messages, **GREEDY)
    longer = [*messages, {"role": "assistant", "content": reply.text}, *messages]
    with begun(engine), begun(engine):
        waiting = [
            engine.start_chat([{"role": "user", "content": f"{i} Hello"}], **GREEDY)
            for i in range(2)
        ]
        with pytest.raises(lmchat.Overloaded, match="max_queue=2"):
            engine.chat([{"role": "user", "content": "Hello there"}], **GREEDY)
        assert engine.queue_stats().waiting_live == 0
        assert engine.chat(longer, **GREEDY).text
        assert engine.queue_stats().preempted_for_live == 1
        for generation in waiting:
            generation.cancel()


def test_a_refused_turn_writes_nothing(engine, monkeypatch):
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            streams.enter_context(begun(engine))
        for _ in range(2):
            streams.enter_context(engine.stream("Wait", **LONG))
        chat = engine.session()
        store, calls = engine._runtime.store, []
        monkeypatch.setattr(store, "begin", lambda *a: calls.append(a), raising=True)
        with pytest.raises(lmchat.Overloaded, match="max_queue=2") as caught:
            chat.send("x")
        with pytest.raises(lmchat.Overloaded):
            engine.check_capacity()
        assert caught.value.retry_after > 0
        assert (calls, chat.turns, chat.unanswered) == ([], (), None)
        engine.check_capacity("another owner")


def test_a_queued_stream_gives_its_place_to_another_owner(engine):
    with begun(engine), begun(engine):
        chat = engine.session()
        queued = [engine.stream("Wait", **LONG), chat.stream("Wait for me", **GREEDY)]
        others = [engine.start_generate("I", owner="other", **LONG) for _ in range(2)]
        with pytest.raises(lmchat.Overloaded, match="another owner"):
            list(queued[1])
        assert engine.queue_stats().refused_queued == 1
        for generation in others:
            generation.cancel()
        queued[0].close()
    assert chat.send("Again", **GREEDY).text


def test_generated_tokens_are_charged_to_the_owner(engine):
    charged, shares = [], engine._runtime.admission._shares
    charge = shares.charge
    shares.charge = lambda ticket, tokens: (charged.append(tokens), charge(ticket, tokens))
    reply = engine.generate("Tell me", max_new_tokens=30, ignore_eos=True)
    assert sum(charged) == len(reply.token_ids) == 30
    assert len(charged) > 1


@pytest.mark.parametrize("value", [0, -1.0, True, "30", float("nan")])
def test_max_wait_is_checked(value):
    with pytest.raises(lmchat.InvalidRequest, match="max_wait is"):
        lmchat.ChatEngine("memo", store="memory", max_wait=value)
