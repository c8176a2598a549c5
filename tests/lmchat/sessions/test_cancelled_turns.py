"""A turn that is cancelled before its first token leaves the session as it was."""

import contextlib
from dataclasses import replace

import pytest
from stores import FaultyStore

import lmchat
from lmchat.generation.state import State
from lmchat.store.memory_store import MemoryStore

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture(name="engine")
def made_engine(store_kind):
    with lmchat.ChatEngine("memo", store=store_kind, threads=1, max_batch_size=1) as engine:
        yield engine
        assert (engine.waiting, engine._runtime.admission.running) == (0, 0)


@contextlib.contextmanager
def full_batch(engine):
    """Every other request waits in the queue, also a short turn of a live session, which would take
    the slot."""
    with pytest.MonkeyPatch.context() as patch, engine.stream("x", **LONG) as stream:
        patch.setattr("lmchat.sessions.turn_execution.LIVE_TOKENS", 0)
        next(stream)
        yield


def in_queue(engine, chat, start):
    """Starts a generation, which waits, and stops it."""
    with full_batch(engine):
        generation = start()
        assert chat.state is State.QUEUED
        return chat.stop(), generation


def in_prefill(chat, start, monkeypatch):
    """Starts a generation and stops it as soon as the engine has it. Tokens that the engine made
    before it saw that are left out."""
    execution = chat._starter.new_execution()
    generation = execution.generation
    attach, feed = generation.attach, generation.feed

    def without_tokens(events):
        for event in events:
            if event.progress or event.finish_reason:
                reason = event.finish_reason and "cancelled"
                feed([replace(event, token_ids=(), logprobs=(), finish_reason=reason)])

    monkeypatch.setattr(chat._starter, "new_execution", lambda: execution)
    monkeypatch.setattr(generation, "attach", lambda stream: (stream.cancel(), attach(stream)))
    monkeypatch.setattr(generation, "journal", lambda _: None)
    monkeypatch.setattr(generation, "feed", without_tokens)
    assert start() is generation
    generation.wait()
    monkeypatch.undo()
    return generation.reply, generation


VERBS = {
    "send": lambda chat: chat.start_send("Two " * 40, **GREEDY),
    "edit": lambda chat: chat.start_edit(0, "Uno", **GREEDY),
    "retry": lambda chat: chat.start_retry(**GREEDY),
    "continue": lambda chat: chat.start_continue(**GREEDY),
}
ASKED = {"send": "Two " * 40, "edit": "Uno"}


@pytest.mark.parametrize("where", ["queue", "prefill"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_session_stays_as_it_was(engine, monkeypatch, verb, where):
    chat = engine.session()
    first = chat.send("One", **GREEDY)
    before = (chat.turns, chat.token_ids, chat.branches(0), chat.branches(1))

    def start():
        return VERBS[verb](chat)

    if where == "queue":
        reply, _ = in_queue(engine, chat, start)
    else:
        reply, _ = in_prefill(chat, start, monkeypatch)
    assert (reply.finish_reason, reply.error) == ("cancelled", None)
    assert reply.usage.completion_tokens == 0
    assert reply.usage.prompt_tokens > 0
    if verb == "continue":  # the reply that was to be continued
        assert (reply.text, reply.token_ids, reply.turn) == (
            first.text, first.token_ids, chat.turns[-1]
        )  # fmt: skip
    else:
        assert (reply.text, reply.token_ids, reply.turn) == ("", [], None)
    assert (chat.turns, chat.token_ids, chat.branches(0), chat.branches(1)) == before
    assert chat.unanswered == ASKED.get(verb)
    assert chat.state is State.IDLE
    chat.refresh()
    assert chat.unanswered == ASKED.get(verb)
    again = VERBS[verb](chat)  # the next one is whole, and clears the question
    again.wait()
    with lmchat.ChatEngine("memo", store="memory", threads=1) as other:
        alone = other.session()
        alone.send("One", **GREEDY)
        wanted = VERBS[verb](alone)
        wanted.wait()
        assert again.reply.token_ids == wanted.reply.token_ids
    assert chat.unanswered is None


def test_a_question_that_was_stopped_outlives_the_process(data_dir):
    options = {"store": data_dir, "threads": 1, "max_batch_size": 1}
    with lmchat.ChatEngine("memo", **options) as engine:
        chat = engine.session("trip")
        in_queue(engine, chat, lambda: chat.start_send("Two", **GREEDY))
    with lmchat.ChatEngine("memo", **options) as engine:
        chat = engine.session("trip")
        assert (chat.unanswered, chat.turns, chat.notices) == ("Two", (), ())
        in_queue(engine, chat, lambda: chat.start_send("Three", **GREEDY))
        assert chat.unanswered == "Three"
        chat.send("Three", **GREEDY)
    with lmchat.ChatEngine("memo", **options) as engine:
        assert engine.session("trip").unanswered is None


def test_asking_again_computes_only_what_is_missing():
    """The prompt of the stopped turn was computed; its KV is found by the handle alone."""
    with lmchat.ChatEngine("memo", store="memory", threads=1, prefix_reuse=False) as engine:
        chat = engine.session()
        chat.send("One", **GREEDY)
        generation = chat.start_send("word " * 300, **GREEDY)
        follower = generation.follow()
        for part in follower.events():
            if isinstance(part, lmchat.Progress):
                generation.cancel()
                break
        generation.wait()
        done = engine.stats().tokens_prefilled
        reply = chat.send("word " * 300, **GREEDY)
        again = engine.stats().tokens_prefilled - done
        if generation.reply.turn is None:
            assert reply.usage.cached_tokens >= part.done
            assert again == reply.usage.prompt_tokens - reply.usage.cached_tokens


def test_a_store_that_fails_leaves_the_session_too():
    store = FaultyStore(MemoryStore())
    with lmchat.ChatEngine("memo", store=store, threads=1, max_batch_size=1) as engine:
        chat = engine.session()
        chat.send("One", **GREEDY)
        before = chat.turns
        store.fail("finish")
        reply, _ = in_queue(engine, chat, lambda: chat.start_send("Two", **GREEDY))
        assert isinstance(reply.error, lmchat.StoreError)
        assert (reply.finish_reason, reply.turn, chat.turns) == ("cancelled", None, before)
        store.heal()
        assert chat.send("Two", **GREEDY).finish_reason == "length"


def test_a_deleted_session_ends_its_waiting_turn(engine):
    chat = engine.session()
    with full_batch(engine):
        generation = chat.start_send("Two", **GREEDY)
        chat.delete()
    assert (generation.reply.finish_reason, generation.reply.turn) == ("cancelled", None)
