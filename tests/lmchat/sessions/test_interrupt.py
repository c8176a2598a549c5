"""Ctrl-C at every moment of every verb: the session continues, and no resource leaks."""

from __future__ import annotations

import gc
import inspect
import random
import signal
import sys
import threading
from pathlib import Path

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.generation.state import State

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 3, "logit_bias": NO_END}
LONG = {"temperature": 0.0, "max_new_tokens": 3000, "logit_bias": NO_END}
FOLDER = str(Path(lmchat.__file__).parent)
# Where text becomes tokens nothing of a session changes; there are many calls.
ELSEWHERE = ("tokenizer", "template", "scene", "context", "marks", "settings", "output", "rule")


@pytest.fixture(scope="module")
def engine(tmp_path_factory, device, store_kind):
    folder = chat_model(tmp_path_factory.mktemp("model"))
    with lmchat.ChatEngine(folder, device=device, threads=1, cache_memory="64MiB") as engine:
        yield engine
        for info in engine.sessions():
            engine.delete(info.name, info.owner)
        assert not engine._running
        assert (engine.waiting, engine._runtime.admission.running) == (0, 0)
        gc.collect()  # what was interrupted while it was made may lie in cycles
        engine._runtime.reader.call(lambda: None)
        engine._runtime.session_reader.call(lambda: None)
        stats = engine.stats()
        assert (stats.handles, stats.pages_referenced, stats.slots) == (0, 0, 0)
        engine.core.check_invariants()


def check(chat):
    """The session answers, and its transcript is the one of its turns."""
    assert chat.send("Next", **GREEDY).finish_reason == "length"
    assert chat.state is State.IDLE
    conversation = Conversation(make_tokenizer())
    system = chat.system
    for turn in chat.turns:
        if turn.role == "user":
            conversation.user(turn.text, system)
            system = None
        elif turn.role == "assistant":
            conversation.reply(list(turn.token_ids))
    assert chat.token_ids == conversation.ids


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th place where a signal could: at the start of a
    function, and after a call of a built-in one."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, _arg):
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or not name.startswith(FOLDER):
            return
        if any(part in name for part in ELSEWHERE) or in_finalizer(frame):
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # it may be its end, by the hand of its finalizer
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


def in_finalizer(frame):
    """There Python itself passes over exceptions."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted(verb, at):
    """Calls `verb` and returns whether it was interrupted."""
    interrupt = Interrupt(at)
    sys.setprofile(interrupt)
    try:
        verb()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def read(stream):
    with stream:
        next(stream)


def stop(chat):
    chat.stream("Tell me", **LONG)
    chat.stop()


VERBS = {
    "send": lambda chat: chat.send("One", **GREEDY),
    "stream": lambda chat: read(chat.stream("Tell me", **LONG)),
    "stream_continue": lambda chat: read(chat.stream_continue(**LONG)),
    "stream_retry": lambda chat: read(chat.stream_retry(**LONG)),
    "stream_edit": lambda chat: read(chat.stream_edit(0, "Uno", **LONG)),
    "stop": stop,
    "continue": lambda chat: chat.continue_(**GREEDY),
    "retry": lambda chat: chat.retry(**GREEDY),
    "edit": lambda chat: chat.edit(0, "Uno", **GREEDY),
    "undo": lambda chat: chat.undo(),
    "switch": lambda chat: chat.switch(0, 0),
    "set_system": lambda chat: chat.set_system("Be brief."),
    "pin": lambda chat: chat.pin(),
    "update": lambda chat: chat.update(title="T", system="Be brief.", pinned=True),
    "refused": lambda chat: chat.send("\ud800"),
}


@pytest.mark.parametrize("name", VERBS)
def test_an_interrupted_verb_leaves_the_session_usable(engine, store_kind, name):
    if store_kind == "disk" and name in ("stream_continue", "stream_edit"):
        pytest.skip("stream_retry reads its reply in the same way, and takes seconds")
    verb = VERBS[name]
    at = 1
    going = True
    while going:
        chat = engine.session(f"{name} {at}")
        chat.send("Zero", **GREEDY)
        error = None
        try:
            going = interrupted(lambda chat=chat: verb(chat), at)
        except lmchat.InvalidRequest as refused:
            going, error = False, refused
        assert (error is not None) == (not going and name == "refused")
        if name.startswith(("stream", "stop")):
            chat.stop()  # a generation that was not returned yet may still run
        check(chat)
        chat.delete()
        at += 1
    assert at > 4


def test_interrupted_open_close_and_delete_leave_nothing_behind(engine):
    """close(), delete(), rename(), fork() and opening again."""

    def live(name):
        with engine.session(name) as chat:
            chat.stream("One", **LONG)
            other = chat.fork(name + " forked")
            chat.rename(name + " renamed")
            other.delete()
        engine.session(name + " renamed").delete()

    at = 1
    while interrupted(lambda at=at: live(f"life {at}"), at):
        for suffix in ("", " forked", " renamed"):
            chat = engine.session(f"life {at}{suffix}")
            chat.stop()
            check(chat)
            chat.delete()
        at += 3
    assert at > 50


@pytest.mark.parametrize(
    "verb",
    [
        lambda engine: engine.chat([{"role": "user", "content": "One"}], **GREEDY),
        lambda engine: read(engine.stream_chat([{"role": "user", "content": "One"}], **LONG)),
        lambda engine: read(engine.stream([1, 2], **LONG)),
    ],
    ids=["chat", "stream_chat", "stream"],
)
def test_an_interrupted_verb_leaves_the_engine_usable(tmp_path, device, verb):
    options = {"cache_memory": "16MiB", "prefix_reuse": False, "store": "memory"}
    with lmchat.ChatEngine(chat_model(tmp_path), device=device, threads=1, **options) as engine:
        at = 1
        while interrupted(lambda: verb(engine), at):
            for generation in list(engine._running):
                assert generation.cancelled or generation.done
            at += 1
        assert at > 4
        assert engine.generate([1, 2], **GREEDY).finish_reason == "length"


def test_an_interrupted_generate_leaves_the_engine_usable(engine):
    at = 1
    while interrupted(lambda: engine.generate([1, 2], **GREEDY), at):
        at += 1
    assert engine.generate([1, 2], **GREEDY).finish_reason == "length"


def test_close_of_the_engine(tmp_path, device, store_kind):
    folder = chat_model(tmp_path)
    at, going = 1, True
    while going:
        engine = lmchat.ChatEngine(folder, device=device, threads=1, cache_memory="16MiB")
        chat = engine.session()
        stream = chat.stream("One", **LONG)
        going = interrupted(engine.close, at)
        engine.close()
        assert stream.reply.finish_reason == "cancelled"
        assert not engine._runtime.reader._thread.is_alive()
        assert not engine._runtime.session_reader._thread.is_alive()
        assert not engine._runtime.worker._thread.is_alive()
        at += 4
    assert at > 8


# Python itself passes over an exception in a finalizer, such as its own of a thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_at_random_moments_leave_the_session_usable(engine, store_kind):
    """Ctrl-C arrives at random moments, most of them while the main thread waits."""
    rng = random.Random(0)
    armed = []

    def handle(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    try:
        chat = engine.session("signals")
        hits = 0
        for _ in range(150 if store_kind == "memory" else 60):
            verb = VERBS[rng.choice(["send", "stream", "stop", "retry", "edit", "continue"])]
            if not chat.turns:
                chat.send("Zero", **GREEDY)
            timer = threading.Timer(
                rng.random() * 0.008, signal.pthread_kill, (main, signal.SIGUSR1)
            )
            timer.start()
            try:
                armed.append(True)
                verb(chat)
                armed.clear()
            except KeyboardInterrupt:
                hits += 1
            finally:
                timer.join()
            chat.stop()
            if chat.length > 700:
                chat.edit(0, "Again", **GREEDY)
            check(chat)
        assert hits > 4
        chat.delete()
    finally:
        signal.signal(signal.SIGUSR1, before)
