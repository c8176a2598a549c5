"""Open sessions: which of them are closed, and what a slow store holds up."""

import contextlib
import gc
import threading

import pytest
from stores import FaultyStore

import lmchat
from lmchat.errors import EngineClosed, InvalidRequest, NotFound, SessionBusy
from lmchat.generation.state import State
from lmchat.store.memory_store import MemoryStore

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 1500, "ignore_eos": True}


def opened(store="memory", **options):
    return lmchat.ChatEngine("memo", store=store, threads=1, cache_memory="16MiB", **options)


def swept(engine):
    """Closes unused sessions, as the worker thread does every few seconds."""
    engine._registry.sweep()
    engine._runtime.worker.call(lambda: None)  # what was dropped is closed
    return engine.stats().handles


def test_an_unused_session_is_closed_and_opens_again():
    with opened(idle_close=0) as engine:
        session = engine.session("trip", system="Be brief.")
        first = session.send("hello " * 80, **GREEDY)
        assert swept(engine) == 1  # a caller holds it
        assert session.state is State.IDLE
        session_id = session.id
        del session
        assert swept(engine) == 0
        assert engine.sessions()[0].state is State.CLOSED
        again = engine.session_by_id(session_id)
        assert again.turns[-1].text == first.text
        assert again.send("and now", **GREEDY).usage.cached_tokens > 0


def test_only_the_last_used_sessions_stay_open():
    with opened(max_open_sessions=2, idle_close=None) as engine:
        for number in range(5):
            engine.session(f"s{number}").send("hello", **GREEDY)
        assert swept(engine) == 2
        states = {info.name: info.state for info in engine.sessions()}
        assert [name for name, state in states.items() if state is State.IDLE] == ["s4", "s3"]


def test_pinned_and_running_sessions_stay_open():
    with opened(idle_close=0, max_open_sessions=1) as engine:
        engine.session("pinned").pin()
        engine.session("pinned").send("hello", **GREEDY)
        generation = engine.session("running").start_send("hello", **LONG)
        engine.session("idle").send("hello", **GREEDY)
        assert swept(engine) == 2
        states = {info.name: info.state for info in engine.sessions()}
        assert states["pinned"] is State.IDLE
        assert states["running"] not in (State.IDLE, State.CLOSED)
        assert states["idle"] is State.CLOSED
        generation.cancel()
        generation.wait()
        assert engine.session("running").turns[-1].finish_reason == "cancelled"
        assert swept(engine) == 1


def test_a_reply_that_the_store_refused_keeps_its_session_open():
    store = FaultyStore(MemoryStore())
    with opened(store, idle_close=0) as engine:
        store.fail("finish", 1, 100)
        reply = engine.session("a").send("hello", **GREEDY)
        assert reply.finish_reason == "error"
        assert swept(engine) == 1
        store.heal()
        assert engine.session("a").turns[-1].token_ids == tuple(reply.token_ids)
        assert engine._registry._unsettled == {}


def test_an_empty_new_session_is_closed_and_not_deleted():
    """A client may have its id."""
    with opened(idle_close=0) as engine:
        session_id = engine.session().id
        swept(engine)
        assert engine.sessions()[0].state is State.CLOSED
        assert engine.session_by_id(session_id).send("hello", **GREEDY)


def test_threads_that_open_and_drop_never_see_a_closed_session():
    """Each use opens the session; the registry closes whatever is not used meanwhile."""
    with opened(idle_close=0, max_open_sessions=1, max_batch_size=8) as engine:
        errors, done = [], threading.Event()

        def use(number):
            try:
                for turn in range(12):
                    session = engine.session(f"s{(number + turn) % 3}")
                    assert session.length >= 0
                    session.set_tags([str(turn)])
                    with contextlib.suppress(SessionBusy):
                        session.send("hello", **GREEDY)
            except BaseException as error:
                errors.append(error)

        def sweep():
            while not done.is_set():
                engine._registry.sweep()

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        sweeper = threading.Thread(target=sweep)
        for thread in (*threads, sweeper):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        sweeper.join()
        assert errors == []
        gc.collect()
        assert swept(engine) == 0
        engine.core.check_invariants()


def test_a_deleted_session_is_not_found_by_those_who_hold_it():
    with opened() as engine:
        session = engine.session("gone")
        generation = session.start_send("hello", **LONG)
        engine.delete("gone")
        assert generation.reply.finish_reason == "cancelled"
        with pytest.raises(NotFound):
            session.send("hello", **GREEDY)
        assert engine.session("gone").turns == ()


def test_limits_are_checked():
    for wrong in ({"idle_close": -1}, {"idle_close": "1"}, {"max_open_sessions": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            opened(**wrong)


class SlowStore(FaultyStore):
    """A store whose calls of `slow` wait until `gate` opens."""

    def __init__(self, store):
        super().__init__(store)
        self.slow, self.gate, self.waiting = "", threading.Event(), threading.Event()

    def __getattr__(self, name):
        method = super().__getattr__(name)
        if name != self.__dict__.get("slow"):
            return method

        def call(*args, **options):
            self.waiting.set()
            assert self.gate.wait(60)
            return method(*args, **options)

        return call


@pytest.mark.parametrize("slow", ["find", "add_numbered", "remove", "change", "begin", "finish"])
def test_a_slow_store_does_not_hold_up_the_tokens_of_others(slow):
    """The call waits on a thread of its caller, and other replies go on meanwhile."""
    store = SlowStore(MemoryStore())
    with opened(store) as engine:
        engine.session("other", owner="you")
        running = engine.session("running").stream("hello", **LONG)
        next(running)
        calls = {
            "find": lambda: engine.session("unknown"),
            "add_numbered": lambda: engine.session(),
            "remove": lambda: engine.delete("other", "you"),
            "change": lambda: engine.session("other", owner="you").set_title("a title"),
            "begin": lambda: engine.session("other", owner="you").send("hello", **GREEDY),
            "finish": lambda: engine.session("other", owner="you").send("hello", **GREEDY),
        }
        store.slow = slow
        thread = threading.Thread(target=calls[slow])
        thread.start()
        assert store.waiting.wait(60)
        for _ in range(20):
            assert next(running) is not None
        assert engine.generate("text", **GREEDY).finish_reason == "length"
        store.gate.set()
        thread.join()
        running.close()


def test_replies_without_a_session_do_not_wait_for_the_journal():
    store = SlowStore(MemoryStore())
    with opened(store) as engine:
        store.slow = "journal"
        running = engine.session("running").start_send("hello", **LONG)
        assert store.waiting.wait(60)
        assert engine.generate("text", **GREEDY).finish_reason == "length"
        store.gate.set()
        running.cancel()
        running.wait()
        assert running.reply.token_ids


@pytest.mark.parametrize("stored", [True, False])
def test_threads_that_open_one_name_get_one_session(stored):
    """All of them look for it before one of them has opened or added it."""
    store = SlowStore(MemoryStore())
    with opened(store, idle_close=0) as engine:
        if stored:
            engine.session("same")
            swept(engine)
        found, store.slow = [], "find"
        threads = [
            threading.Thread(target=lambda: found.append(engine.session("same"))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
            assert store.waiting.wait(60)
            store.waiting.clear()
        store.gate.set()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(map(id, found))) == 1


class _Found(MemoryStore):
    """A store in which another thread finds a new session before it is open here."""

    def __init__(self):
        super().__init__()
        self.look = None

    def add(self, record):
        stored = super().add(record)
        self.look(record.name)
        return stored

    def add_numbered(self, record):
        stored = super().add_numbered(record)
        self.look(stored.name)
        return stored


def test_a_name_is_one_object_whoever_finds_it_first():
    store, found = _Found(), []
    with opened(store) as engine:
        store.look = lambda name: found.append(engine._registry.find("local", name))
        assert engine.session("new") is found[-1]
        assert engine.session("new") is found[-1]
        source = engine.session("source")
        source.send("hello", **GREEDY)
        copy = source.fork("copy")
        assert copy is found[-1]
        assert copy.send("and now", **GREEDY).finish_reason == "length"
        assert engine.session() is found[-1]
        del found[:]


def test_names_of_several_threads_at_once_are_one_object(tmp_path):
    with opened(str(tmp_path)) as engine:
        for number in range(40):
            start, sessions = threading.Barrier(4), []

            def make(start=start, sessions=sessions, number=number):
                start.wait()
                sessions.append(engine.session(f"s{number}"))

            threads = [threading.Thread(target=make) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(map(id, sessions))) == 1


def test_a_closed_engine_says_so_at_every_door(tmp_path):
    """Also where its store is asked: it was a StoreError."""
    engine = opened(str(tmp_path))
    session = engine.session("a")
    session.send("hello", **GREEDY)
    engine.close()
    for call in (engine.sessions, session.stop, session.turns.__len__, engine.stats):
        with contextlib.suppress(EngineClosed, NotFound):
            call()
    with pytest.raises(EngineClosed):
        engine._runtime.store.summaries()
