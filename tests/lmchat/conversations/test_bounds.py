"""Bounds of what is kept of conversations, and the shares of their owners."""

import random

import pytest
from chat_models import chat_model

import lmchat
from lmchat.conversations.known_replies import KnownReplies, KnownReply
from lmchat.conversations.shared_cache import SharedCache
from lmchat.store.turns import Turn


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def made():
    """Makes a cache, with the list of what it dropped and its clock."""

    def make(most=100, size=1000, seconds=60.0):
        dropped, clock = [], Clock()
        return SharedCache(most, size, seconds, dropped.append, clock), dropped, clock

    return make


def test_the_owner_with_the_largest_share_loses_its_oldest_values(made):
    cache, dropped, _ = made(most=4)
    for value in ("a1", "a2", "a3", "b1"):
        cache.put(value[0], value, 1)
    cache.put("a", "a1", 1)  # used again
    cache.put("b", "b2", 1)
    cache.put("b", "b3", 1)
    assert dropped == ["a2", "b1"]
    cache.put("c", "c1", 1)
    assert sorted(cache.of("a")) == ["a1", "a3"] or sorted(cache.of("b")) == ["b2", "b3"]


def test_sizes_count_as_numbers_do(made):
    cache, dropped, _ = made(size=100)
    cache.put("a", "small", 10)
    cache.put("b", "large", 60)
    cache.put("b", "larger", 40)
    assert dropped == ["large"]
    cache.put("b", "larger", 95)  # grew
    assert list(cache.of("a")) == ["small"]
    assert cache.size == 10


def test_values_grow_too_old(made):
    cache, dropped, clock = made(seconds=60.0)
    cache.put("a", "a1", 1)
    clock.now = 50.0
    cache.put("a", "a2", 1)
    clock.now = 70.0
    cache.expire()
    assert dropped == ["a1"]
    cache.clear()
    assert dropped == ["a1", "a2"]
    assert len(cache) == cache.size == 0


def test_random_use_keeps_the_bounds_and_every_share(made):
    rng = random.Random(3)
    cache, dropped, clock = made(most=60, size=600, seconds=1e9)
    alive = {}
    for step in range(5000):
        clock.now += 1
        owner = rng.choice("aaaaaaabbbcd")
        value = rng.choice([*alive, f"{owner}{step}"])
        owner = alive.get(value, (owner,))[0]
        if rng.random() < 0.1 and value in alive:
            assert cache.remove(value)
            del alive[value]
            continue
        size = rng.randrange(1, 30)
        alive[value] = (owner, size)
        cache.put(owner, value, size)
        for gone in dropped:
            mine = alive.pop(gone)[0]
            held = sum(s for o, s in alive.values() if o == mine)
            assert all(
                held + 30 >= sum(s for o, s in alive.values() if o == other)
                or sum(o == mine for o, _ in alive.values()) + 1
                >= sum(o == other for o, _ in alive.values())
                for other in "abcd"
            )
        dropped.clear()
        assert len(cache) == len(alive) <= 60
        assert cache.size == sum(size for _, size in alive.values()) <= 600
        assert sorted(v for o in "abcd" for v in cache.of(o)) == sorted(alive)


def reply(text, ids, past=b"", reasoning=""):
    return KnownReply(
        Turn(0, None, "assistant", text, {}, tuple(ids), reasoning=reasoning), past, None
    )


def test_of_equal_texts_the_one_after_the_same_messages_is_found():
    known = KnownReplies()
    for i, past in enumerate((b"a", b"b", b"c")):
        known.add("local", reply("Yes.", [i], past, reasoning=f"r{i}"))
    find = lambda past, reasoning=None, text=" Yes.": known.find(  # noqa: E731
        "local", lambda: past, text, reasoning
    )
    assert find(b"b").turn.token_ids == (1,)
    assert find(b"?").turn.token_ids == (2,)
    assert find(b"?", "r0\n").turn.token_ids == (0,)
    assert find(b"?", "other") is None
    assert find(b"?", text="No.") is None
    assert known.find("other", lambda: b"b", "Yes.", None) is None


def test_many_replies_of_one_text_are_few():
    known = KnownReplies()
    for i in range(1000):
        known.add("local", reply("Yes.", [i], str(i).encode()))
    assert len(known) <= 16
    for _ in range(100):
        known.add("local", reply("No.", [1, 2], b"same"))
    assert len(known) <= 17


def test_replies_of_a_loud_owner_do_not_evict_those_of_another():
    known = KnownReplies()
    known.add("quiet", reply("Yes.", [1]))
    for i in range(300):
        known.add("loud", reply(f"{i} " * 50_000, [i]))
    assert known.find("quiet", bytes, "Yes.", None) is not None
    assert len(known) < 300
    assert known.find("loud", bytes, "0 " * 50_000, None) is None


def test_a_conversation_far_beyond_the_context_is_refused_and_leaves_nothing(tmp_path):
    folder = chat_model(tmp_path / "m", context=256)
    with lmchat.ChatEngine(folder, store="memory") as engine:
        messages = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(20_001)]
        with pytest.raises((lmchat.ContextFull, lmchat.InvalidRequest)):
            engine.chat(messages)
        assert engine.stats().handles == 0
        assert engine.chat(messages[:1], max_new_tokens=1).usage.completion_tokens == 1
