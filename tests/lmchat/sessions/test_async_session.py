"""The asyncio API never waits on the loop's thread."""

import asyncio
import functools
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import lmchat
from lmchat.aio.threads import THREADS
from lmchat.store.memory_store import MemoryStore

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


def on_loop(run):
    """Runs a coroutine function with an engine."""

    async def main():
        async with lmchat.AsyncChatEngine(
            "memo", store=MemoryStore(), threads=1, cache_memory="16MiB"
        ) as engine:
            return await run(engine)

    return asyncio.run(main())


def test_it_has_the_names_of_a_session():
    """What a Session offers, an AsyncSession offers, but for starting without waiting."""
    own = {"removed", "start_resume"}
    names = {n for n in dir(lmchat.Session) if not n.startswith("_")} - own
    assert names <= set(vars(lmchat.AsyncSession))


def test_properties_need_no_lock_and_all_else_is_awaited():
    async def run(engine):
        session = await engine.session("a", system="Be brief.", metadata={"k": "v"})
        await session.send("hello", **GREEDY)
        locked, ready, done = session.sync._lock, threading.Event(), threading.Event()

        def hold():
            with locked, session.sync._writer._writing:
                ready.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        ready.wait(60)
        values = {
            name: getattr(session, name)
            for name, value in vars(type(session)).items()
            if isinstance(value, property)
        }
        waiting = asyncio.create_task(session.warm())
        await asyncio.sleep(0)
        done.set()
        thread.join()
        await waiting
        assert values["metadata"] == {"k": "v"}
        assert values["length"] == session.sync.length > 0
        assert len(await session.turns()) == 3
        assert await session.token_ids() == session.sync.token_ids
        assert (await session.system(), await session.title()) == ("Be brief.", "hello")
        assert not await session.interrupted()
        assert len(await session.branches(0)) == 1
        others = set(vars(type(session))) - set(values) - {"sync"}
        for name in others:
            value = getattr(session, name)
            is_awaited = inspect.iscoroutinefunction(value) or name.startswith("stream")
            assert is_awaited or name.startswith("_"), name

    on_loop(run)


def test_slow_calls_leave_threads_for_others(monkeypatch):
    """asyncio's own executor has 6 threads on 2 cores."""

    async def run(engine):
        gate, started = threading.Event(), threading.Semaphore(0)
        render = engine.sync._runtime.builder.check_system

        def slow(turns):
            if turns:
                started.release()
                assert gate.wait(60)
            return render(turns)

        monkeypatch.setattr(engine.sync._runtime.builder, "check_system", slow)
        waiting = [
            asyncio.create_task(engine.session(f"s{n}", system="slow")) for n in range(THREADS - 2)
        ]
        for _ in waiting:
            while not started.acquire(blocking=False):
                await asyncio.sleep(0.001)
        reply = await (await engine.session("quick")).send("hello", **GREEDY)
        gate.set()
        sessions = await asyncio.gather(*waiting)
        assert reply.finish_reason == "length"
        assert len({session.id for session in sessions}) == THREADS - 2

    on_loop(run)


def test_following_uses_the_engine_s_threads():
    """Not asyncio's own, of which six waiting calls leave none."""

    async def run(engine):
        session = await engine.session("a")
        await session.send("hello", **GREEDY)
        asyncio.get_running_loop().set_default_executor(refusing := ThreadPoolExecutor(1))
        refusing.shutdown()
        async with await session.follow() as follower:
            assert (await follower.result()).finish_reason == "length"

    on_loop(run)


def test_a_started_reply_needs_no_reader():
    async def run(engine):
        session = await engine.session("a")
        for start in (
            functools.partial(session.start_send, "hello"),
            session.start_retry,
            functools.partial(session.start_edit, 0, "hi"),
            session.start_continue,
        ):
            await start(**GREEDY)
            async with await session.follow() as follower:
                reply = await follower.result()
            # The reply may have been stored before it was followed.
            assert reply.token_ids == list((await session.turns())[-1].token_ids)
        assert [turn.text for turn in await session.turns()][:1] == ["hi"]
        assert len(reply.token_ids) == 2 * GREEDY["max_new_tokens"]

    on_loop(run)


def test_sessions_by_id_and_many_at_once():
    async def run(engine):
        sessions = [await engine.session(f"s{number}") for number in range(3)]
        found = await engine.session_by_id(sessions[1].id)
        assert found.sync is sessions[1].sync
        await found.set_metadata({"a": "b"})
        page = await engine.sessions(limit=2)
        assert [info.metadata for info in page] == [{}, {"a": "b"}]
        assert len(await engine.sessions(after=page[-1].id)) == 1
        assert len(await engine.residences(sessions)) == 3
        assert len(await engine.predicted_ttfts(sessions)) == 3
        assert [one.ttft for one in await engine.forecasts(sessions)] == (
            await engine.predicted_ttfts(sessions)
        )

    on_loop(run)


def test_a_closed_engine_refuses_calls():
    async def main():
        engine = lmchat.AsyncChatEngine(
            "memo", store=MemoryStore(), threads=1, cache_memory="16MiB"
        )
        async with engine:
            session = await engine.session("a")
        await engine.close()
        for call in (engine.session, session.undo, session.turns):
            with pytest.raises(lmchat.EngineClosed):
                await call()

    asyncio.run(main())


def test_a_reply_is_read_on_its_own_loop():
    def elsewhere(make):
        """Runs a coroutine on another loop, in another thread."""
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(lambda: asyncio.run(make())).result(60)

    async def run(engine):
        session = await engine.session("a")
        stream = session.stream("hello", max_new_tokens=1500, ignore_eos=True)
        await stream.__anext__()
        follower = await session.follow()
        other = (await engine.session("b")).stream("more", **GREEDY)
        for make in (stream.__anext__, stream.result, stream.take, follower.result, other.result):
            with pytest.raises(lmchat.InvalidRequest, match="another event loop"):
                await asyncio.to_thread(elsewhere, make)
        await stream.stop()
        assert (await follower.result()).finish_reason == "cancelled"
        assert (await other.result()).finish_reason == "length"

    on_loop(run)


def test_the_result_of_a_running_generation_is_refused():
    with lmchat.ChatEngine("memo", store="memory", threads=1, cache_memory="16MiB") as engine:
        session = engine.session("a")
        generation = session.start_send("hello", max_new_tokens=1500, ignore_eos=True)
        with pytest.raises(lmchat.InvalidRequest, match="has not ended, expected its end: wait"):
            generation.result()
        generation.cancel()
        generation.wait()
        assert generation.result().finish_reason == "cancelled"


def test_two_engines_of_one_store_object_see_each_others_turns():
    store, options = MemoryStore(), {"threads": 1, "cache_memory": "16MiB"}
    with (
        lmchat.ChatEngine("memo", store=store, **options) as one,
        lmchat.ChatEngine("memo", store=store, dtype="float32", **options) as two,
    ):
        first, second = one.session("a"), two.session("a")
        first.send("hello", **GREEDY)
        second.send("more", **GREEDY)
        assert len(second.turns) == 4
        first.refresh()
        assert [turn.text for turn in first.turns] == [turn.text for turn in second.turns]
