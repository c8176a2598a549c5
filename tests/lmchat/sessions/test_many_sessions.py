"""Many sessions at once, from threads and from asyncio, with stops and drops at random."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from turbomind import Engine

SESSIONS = 32
ROUNDS = 5
SETTINGS = {"temperature": 1.0, "top_k": 40}


pytestmark = pytest.mark.usefixtures("store_kind")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder, device):
    with Engine(folder, device=device, threads=2, cache_memory="64MiB") as engine:
        yield engine


OPTIONS = {"threads": 2, "cache_memory": "24MiB", "max_batch_size": 12}


def check_session(chat, exchanged, reference):
    """Every reply is the one of a request of its own, and the transcript is made of them."""
    conversation = Conversation(make_tokenizer())
    # A turn that was stopped before its first token leaves the session as it was.
    exchanged = [(text, reply) for text, reply in exchanged if reply is None or reply.turn]
    turns = [turn for turn in chat.turns if turn.role == "assistant"]
    assert [t.text for t in chat.turns if t.role == "user"] == [text for text, _ in exchanged]
    for turn, (text, reply) in zip(turns, exchanged, strict=True):
        conversation.user(text)
        ids = list(turn.token_ids)
        if reply is not None:
            assert ids == reply.token_ids
        if ids:
            alone = reference.generate(
                conversation.ids, **SETTINGS, seed=turn.settings["seed"], max_new_tokens=len(ids)
            )
            assert alone.token_ids == ids
        conversation.reply(ids)
    assert chat.token_ids == conversation.ids


def check_engine(engine):
    for info in engine.sessions():
        engine.delete(info.name, info.owner)
    engine.core.evict()
    stats = engine.stats()
    assert stats.pages_free == stats.pages_total
    assert (stats.handles, stats.slots, stats.waiting) == (0, 0, 0)
    assert (engine.waiting, engine._runtime.admission.running) == (0, 0)
    engine.core.check_invariants()


def text_of(rng, number):
    return f"{number} " + "word " * rng.choice([1, 3, 30])


def chat_in_a_thread(engine, number, exchanged):
    rng = random.Random(number)
    chat = engine.session(f"t{number}", owner=f"owner {number % 3}", settings=SETTINGS)
    for _ in range(ROUNDS):
        text = text_of(rng, number)
        kind = rng.choice(["send", "stream", "stop", "drop", "early"])
        if kind == "send":
            exchanged.append((text, chat.send(text, max_new_tokens=rng.randint(1, 30))))
            continue
        stream = chat.stream(text, max_new_tokens=rng.randint(20, 60))
        if kind == "stream":
            shown = "".join(stream)
            assert shown == stream.reply.text
        elif kind == "stop":
            next(stream, None)
            chat.stop()
        elif kind == "drop":
            next(stream, None)
            del stream
            exchanged.append((text, None))
            continue
        stream_reply = stream.stop()
        assert stream_reply is not None
        assert list(stream.events()) == [] or kind != "stream"
        exchanged.append((text, stream_reply))
    chat.stop()
    return chat


async def chat_in_a_task(engine, number, exchanged):
    rng = random.Random(number)
    chat = await engine.session(f"a{number}", owner=f"owner {number % 3}", settings=SETTINGS)
    for _ in range(ROUNDS):
        text = text_of(rng, number)
        kind = rng.choice(["send", "stream", "stop", "drop", "cancel"])
        if kind == "send":
            exchanged.append((text, await chat.send(text, max_new_tokens=rng.randint(1, 30))))
        elif kind == "cancel":
            task = asyncio.create_task(chat.send(text, max_new_tokens=200))
            await asyncio.sleep(rng.random() * 0.05)
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            await chat.stop()  # it may also have waited for the end of the one before
            begun = not isinstance(results[0], asyncio.CancelledError)
            asked = [t.text for t in await chat.turns() if t.role == "user"]
            if begun or asked[len(exchanged) :] == [text]:
                exchanged.append((text, None))
        elif kind == "drop":
            async for _ in chat.stream(text, max_new_tokens=60):
                break
            exchanged.append((text, None))
        else:
            async with chat.stream(text, max_new_tokens=rng.randint(20, 60)) as stream:
                shown = []
                async for delta in stream:
                    shown.append(delta)
                    if kind == "stop" and len(shown) > 2:
                        await chat.stop()
            assert "".join(shown) == stream.reply.text
            exchanged.append((text, stream.reply))
    await chat.stop()
    return chat


def test_sessions_of_many_threads_lose_and_cross_no_token(folder, device, reference):
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        exchanged = [[] for _ in range(SESSIONS)]
        chats = [None] * SESSIONS
        errors = []

        def run(number):
            try:
                chats[number] = chat_in_a_thread(engine, number, exchanged[number])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(SESSIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        for chat, texts in zip(chats, exchanged, strict=True):
            check_session(chat, texts, reference)
        check_engine(engine)


def test_sessions_of_many_tasks_lose_and_cross_no_token(folder, device, reference):
    async def run():
        async with lmchat.AsyncChatEngine(folder, device=device, **OPTIONS) as engine:
            exchanged = [[] for _ in range(SESSIONS)]
            chats = await asyncio.gather(
                *(chat_in_a_task(engine, n, exchanged[n]) for n in range(SESSIONS))
            )
            for chat, texts in zip(chats, exchanged, strict=True):
                check_session(chat.sync, texts, reference)
            check_engine(engine.sync)

    asyncio.run(run())


def test_both_faces_share_a_session(folder, device):
    async def run():
        async with lmchat.AsyncChatEngine(folder, device=device, **OPTIONS) as engine:
            chat = await engine.session("one", settings={"max_new_tokens": 5})
            first = await chat.send("One")
            second = await asyncio.to_thread(engine.sync.session("one").send, "Two")
            assert [t.text for t in await chat.turns()] == ["One", first.text, "Two", second.text]
            with pytest.raises(lmchat.ContextFull):
                await chat.send("word " * 5000)
            other = await chat.fork("two")
            assert await other.undo() == "Two"
            reply = await other.retry()
            assert reply.turn.id == (await other.turns())[-1].id
            assert (await engine.generate([1, 2], max_new_tokens=2)).token_ids
            assert len(await engine.score([1, 2, 3])) == 2

    asyncio.run(run())


def test_a_live_turn_beside_a_strangers_long_prompt(tmp_path, device):
    """Its first token comes within a few steps of the engine, not after the stranger's 23."""
    folder = chat_model(tmp_path, context=8192)
    options = {**OPTIONS, "prefill_chunk": 128, "isa": "portable", "store": "memory"}
    with lmchat.ChatEngine(folder, device=device, **options) as engine:
        chat = engine.session("live", owner="a", settings={"temperature": 0.0})
        chat.send("word " * 200, max_new_tokens=4)
        stranger = engine.session("long", owner="b").stream("word " * 2000, max_new_tokens=1)
        events = stranger.events()
        first = next(part for part in events if isinstance(part, lmchat.Progress))
        assert first.done < first.total - 3000 > 3000
        before = engine.stats()
        stream = chat.stream("And now?", max_new_tokens=1000, ignore_eos=True)
        next(stream.events())
        while not stream._generation.sampled:
            time.sleep(0.001)
        # However late this looks: each step after that of the first token brings one token, which
        # the reader may not have seen yet. Some steps pass before the request is sent.
        after = engine.stats()
        stream.close()
        tokens = after.tokens_decoded - before.tokens_decoded
        assert tokens >= 1
        assert after.steps - before.steps - (tokens - 1) <= 8
        stranger.close()
