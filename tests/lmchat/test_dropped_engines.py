"""Engines that nobody closes, as in a notebook whose cell is run again."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import lmchat

OPTIONS = {"threads": 1, "cache_memory": "32MiB", "device": "cpu"}
SHORT = {"max_new_tokens": 3, "ignore_eos": True}


def held():
    """The numbers of this process's open files and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def ended(worker):
    """Collects what was dropped, and waits for the thread that closes it."""
    for _ in range(600):
        gc.collect()  # again: a thread of the loop's executor may have held something
        worker._thread.join(0.1)
        if not worker._thread.is_alive():
            break
    assert not worker._thread.is_alive()
    gc.collect()


def used(store):
    """Uses an engine in every way. Returns its worker alone."""
    engine = lmchat.ChatEngine(store=store, **OPTIONS)
    engine.cycle = engine  # what a notebook's history does
    session = engine.session("a")
    session.send("Hi", **SHORT)
    assert "".join(session.stream("More", **SHORT))
    engine.chat([{"role": "user", "content": "Hi"}], **SHORT)
    engine.generate("Once", **SHORT)
    return engine._runtime.worker


def stored(store):
    """Returns the number of turns that another engine finds, and who is busy with them."""
    with lmchat.ChatEngine(store=str(store), **OPTIONS) as engine:
        return len(engine.session("a").turns), engine.sessions()[0].busy


def test_a_dropped_engine_gives_its_threads_and_files_back(tmp_path):
    ended(used(str(tmp_path)))  # opens what stays open in any case
    before = held()
    for turn in range(2, 4):
        ended(used(str(tmp_path)))
        assert held() == before
        assert stored(tmp_path) == (4 * turn, "")


def test_a_dropped_asyncio_engine_is_closed(tmp_path):
    async def use():
        engine = await lmchat.AsyncChatEngine(store=str(tmp_path), **OPTIONS).start()
        session = await engine.session("a")
        await session.send("Hi", **SHORT)
        return engine.sync._runtime.worker

    ended(asyncio.run(use()))


def test_a_session_and_a_reply_outlive_the_engine(tmp_path):
    session = lmchat.ChatEngine(store=str(tmp_path), **OPTIONS).session("a")
    gc.collect()
    assert session.send("Hi", **SHORT).finish_reason == "length"
    worker = session._runtime.worker
    stream = session.stream("More", max_new_tokens=30, ignore_eos=True)
    del session
    gc.collect()
    assert len("".join(stream)) > 0
    assert stream.reply.finish_reason == "length"
    del stream
    ended(worker)


def test_a_closed_engine_is_not_closed_again(tmp_path):
    engine = lmchat.ChatEngine(store=str(tmp_path), **OPTIONS)
    worker = engine._runtime.worker
    engine.close()
    del engine
    ended(worker)
