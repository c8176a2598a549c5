"""Sessions when things go wrong: errors, lost handles, finalizers, short memory, cancelling."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.aio.session import AsyncSession
from lmchat.aio.stream import AsyncReplyStream
from lmchat.generation.state import State
from lmchat.text.replies.reply_parser import ReplyParser
from turbomind import Event, Stream

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
LONG = {"max_new_tokens": 3000, "logit_bias": NO_END, "temperature": 0.0}
SETTINGS = {"threads": 2}
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


pytestmark = pytest.mark.usefixtures("store_kind")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder, device):
    with lmchat.ChatEngine(folder, device=device, cache_memory="64MiB", **SETTINGS) as engine:
        yield engine
        check_books(engine)


def check_books(engine):
    for info in engine.sessions():
        engine.delete(info.name, info.owner)
    assert (engine.waiting, engine._runtime.admission.running) == (0, 0)
    stats = engine.stats()
    assert (stats.handles, stats.pages_referenced, stats.slots) == (0, 0, 0)
    engine.core.check_invariants()


def ids_of(chat):
    """The transcript by hand."""
    conversation = Conversation(make_tokenizer())
    for turn in chat.turns:
        if turn.role == "user":
            conversation.user(turn.text)
        else:
            conversation.reply(list(turn.token_ids))
    return conversation.ids


# --- errors --------------------------------------------------------------------------------------


def break_at(monkeypatch, error, least):
    """The next stream that has given `least` tokens ends with `error`."""
    poll, seen = Stream.poll, []

    def broken(self):
        events = poll(self)
        tokens = sum(len(event.token_ids) for event in events)
        seen.append(tokens)
        if sum(seen) >= least:
            self.cancel()
            # The engine itself reports "cancelled".
            return [
                Event(finish_reason="error", error=error, terminal=True) if e.terminal else e
                for e in events
            ]
        return events

    monkeypatch.setattr(Stream, "poll", broken)


def test_an_error_in_the_middle_keeps_what_came(engine, monkeypatch):
    chat = engine.session()
    with monkeypatch.context() as patch:
        break_at(patch, lmchat.ModelError("the logits are no numbers"), 3)
        with chat.stream("One", **LONG) as stream:
            text = "".join(stream)
    reply = stream.reply
    assert (reply.finish_reason, str(reply.error)) == ("error", "the logits are no numbers")
    assert len(reply.token_ids) >= 3
    assert reply.text == text == chat.turns[-1].text
    before = engine.stats().tokens_prefilled
    longer = chat.continue_(max_new_tokens=5)
    assert engine.stats().tokens_prefilled - before == 1
    whole = engine.session().send("One", **{**LONG, "max_new_tokens": len(longer.token_ids)})
    assert longer.token_ids == whole.token_ids
    assert longer.error is None
    assert chat.token_ids == ids_of(chat)


@pytest.mark.parametrize("verb", ["send", "continue", "retry", "edit"])
def test_an_error_before_the_first_token_changes_nothing(engine, monkeypatch, verb):
    chat = engine.session(settings=GREEDY)
    chat.send("One " * 40)
    before = (chat.turns, chat.token_ids, chat.settings, len(chat._record.tree))
    verbs = {
        "send": lambda: chat.send("Two"),
        "continue": lambda: chat.continue_(),
        "retry": lambda: chat.retry(),
        "edit": lambda: chat.edit(0, "Uno"),
    }
    poll = Stream.poll

    def broken(self):
        return [
            Event(finish_reason="error", error=lmchat.ModelError("no numbers"), terminal=True)
            if e.terminal
            else Event(progress=e.progress)
            for e in poll(self)
        ]

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "poll", broken)
        with pytest.raises(lmchat.ModelError, match="no numbers"):
            verbs[verb]()
    assert (chat.turns, chat.token_ids, chat.settings, len(chat._record.tree)) == before
    assert chat.state is State.IDLE
    computed = engine.stats().tokens_prefilled
    chat.send("Three")
    assert engine.stats().tokens_prefilled - computed <= len(chat.turns[-2].token_ids) + 1
    assert chat.token_ids == ids_of(chat)


def test_what_we_do_wrong_ourselves_ends_only_the_reply(engine, monkeypatch):
    """And not before the engine is done with the handle, so that the next turn can have it."""
    chat = engine.session()
    push = ReplyParser.push
    with monkeypatch.context() as patch:

        def broken(self, ids):
            if self._pushed > 4:
                raise ZeroDivisionError
            return push(self, ids)

        patch.setattr(ReplyParser, "push", broken)
        reply = chat.send("One", **LONG)
    assert reply.finish_reason == "error"
    assert "ZeroDivisionError" in str(reply.error)
    assert isinstance(reply.error, lmchat.InternalError)
    assert chat.send("Two", **GREEDY).finish_reason == "length"
    assert chat.token_ids == ids_of(chat)


def test_reading_that_fails_ends_only_that_reply(engine, monkeypatch):
    chat = engine.session()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "poll", lambda self: 1 / 0)
        with pytest.raises(lmchat.InternalError, match="ZeroDivisionError"):
            chat.send("One", **GREEDY)
    assert chat.state is State.IDLE
    assert engine.session().send("One", **GREEDY).finish_reason == "length"


def test_handles_that_the_engine_has_lost(engine):
    chat = engine.session(settings=GREEDY)
    chat.send("One")
    chat.edit(0, "Uno")
    chat.edit(0, "Eins")
    chat.switch(0, 0)
    for cached in chat._handles._handles:
        cached.handle.close()
    chat.send("Two")
    assert chat.token_ids == ids_of(chat)
    for cached in chat._handles._handles:
        cached.handle.close()
    chat.edit(1, "Dos")  # the copy that would keep the old branch is lost as well
    assert chat.token_ids == ids_of(chat)
    for cached in chat._handles._handles:
        cached.handle.close()
    chat.pin()
    chat.send("Three")
    assert chat.token_ids == ids_of(chat)


def test_a_stream_that_has_ended_is_empty(engine):
    chat = engine.session()
    stream = chat.stream("One", **GREEDY)
    text = "".join(stream)
    assert list(stream) == []
    assert list(stream.events()) == []
    assert stream.reply.text == text
    assert stream.stop() is stream.reply


@pytest.mark.parametrize("prompt", [["a"], [10**9], [-1], [2**40], [1.5], 5, None, [], "\ud800"])
def test_prompts_that_are_none(engine, prompt):
    for verb in (engine.generate, engine.stream, engine.score):
        with pytest.raises(lmchat.InvalidRequest):
            verb(prompt)


def test_names_of_arguments_are_no_settings(engine):
    chat = engine.session()
    with pytest.raises(lmchat.InvalidRequest, match="unknown setting 'self'"):
        chat.set(self=1)
    with pytest.raises(lmchat.InvalidRequest, match="name is ''"):
        chat.fork("")


# --- continuing ----------------------------------------------------------------------------------


def test_continuing_that_is_stopped_at_once(engine, monkeypatch):
    """The stop token is in the transcript and not in the handle."""
    chat = engine.session()
    eos = engine.tokenizer.special_texts["<|im_end|>"]
    chat.send("One", temperature=0.0, logit_bias={eos: 100.0})
    assert chat.turns[-1].stopped
    run = chat._starter.new_execution()
    monkeypatch.setattr(chat._starter, "new_execution", lambda: run)
    attach = run.generation.attach
    monkeypatch.setattr(
        run.generation, "attach", lambda stream: (attach(stream), run.generation.cancel())
    )
    reply = chat.continue_(max_new_tokens=3000, logit_bias=NO_END)
    monkeypatch.undo()
    assert reply.finish_reason == "cancelled"
    assert reply.token_ids[:1] == [eos] or eos not in reply.token_ids
    chat.send("Two", **GREEDY)
    assert chat.token_ids == ids_of(chat)


def test_reasoning_tokens_of_a_continued_reply_are_those_of_the_call(tmp_path, device):
    folder = chat_model(tmp_path, template=THINKING)
    with lmchat.ChatEngine(folder, device=device, cache_memory="32MiB", **SETTINGS) as engine:
        assert engine.template_info.reasoning is not None
        chat = engine.session()
        first = chat.send("One", **GREEDY)
        assert first.usage.reasoning_tokens == 8
        assert chat.continue_(max_new_tokens=4).usage.reasoning_tokens == 4
        assert len(chat.turns[-1].token_ids) == 12


# --- a template that changes earlier turns --------------------------------------------------------


def test_following_a_template_that_drops_reasoning(tmp_path, device):
    folder = chat_model(tmp_path, template=THINKING)
    with lmchat.ChatEngine(folder, device=device, cache_memory="64MiB", **SETTINGS) as engine:
        encode = engine.tokenizer.encode
        close = encode("\n</think>\n\n")

        def ask(chat, text, thought, answer):
            """A reply that thinks, made by letting only its tokens be sampled."""
            ids = [*encode(thought), *close, *encode(answer)]
            eos = engine.tokenizer.special_texts["<|im_end|>"]
            for i, token in enumerate([*ids, eos]):
                bias = {"logit_bias": {token: 1000.0}, "max_new_tokens": 1, "temperature": 0.0}
                reply = chat.continue_(**bias) if i else chat.send(text, **bias)
                if i == 0:
                    sent = reply
            assert (reply.text, reply.reasoning) == (answer, thought)
            return sent

        def expected(*rounds, system=None):
            """The template's own rendering in one piece, its last reply with its reasoning."""
            text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
            for question, answer in rounds:
                text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                text += f"{answer}<|im_end|>\n" if answer else "<think>\n"
            return encode(text)

        def prompt(chat):
            return chat.token_ids[: chat.turns[-2].length]

        chat = engine.session(history="template")
        first = ask(chat, "One", "let me think", "Uno")
        assert (first.notices, first.usage.rewritten_tokens) == ((), 0)
        past = chat.token_ids
        before = engine.stats().tokens_prefilled
        second = chat.send("Two", **GREEDY)
        wanted = expected(("One", "Uno"), ("Two", None))
        assert prompt(chat) == wanted
        same = next(i for i, (a, b) in enumerate(zip(past, wanted, strict=False)) if a != b)
        assert engine.stats().tokens_prefilled - before == len(wanted) - same
        assert second.usage.rewritten_tokens == len(past) - 1 - same  # without the stop token
        assert "changed earlier turns" in second.notices[0]
        assert second.usage.cached_tokens == same

        other = chat.fork("other")
        assert other.token_ids == chat.token_ids
        assert chat.undo() == "Two"
        assert chat.token_ids == past
        before = engine.stats().tokens_prefilled
        longer = chat.continue_(max_new_tokens=2, temperature=0.0, logit_bias={})
        assert engine.stats().tokens_prefilled - before <= 1  # the old branch has its KV
        assert longer.text.startswith("Uno")
        chat.switch(1, 0) if chat.branches(1) else chat.switch(0, 0)

        other.set_system("Be brief.")
        rounds = [turn for turn in other.turns if turn.role == "user"]
        assert [turn.text for turn in rounds] == ["One", "Two"]
        assert prompt(other) == expected(("One", "Uno"), ("Two", None), system="Be brief.")
        before = engine.stats().tokens_prefilled
        three = other.send("Three", **GREEDY)
        assert other.token_ids == other._record.tree.token_ids(other._record.leaf)
        assert engine.stats().tokens_prefilled - before == (
            three.usage.prompt_tokens - three.usage.cached_tokens
        )
        check_books(engine)


# --- finalizers and threads -----------------------------------------------------------------------


def test_a_stream_may_be_dropped_anywhere(folder, device):
    """A finalizer runs in whatever its thread does, whatever that has locked."""
    with lmchat.ChatEngine(
        folder, device=device, max_batch_size=1, cache_memory="32MiB", **SETTINGS, store="memory"
    ) as engine:
        first, second = engine.session(), engine.session()
        running = first.stream("Tell me", **LONG)
        next(running)
        waiting = second.stream("Wait", **LONG)
        admission, store = engine._runtime.admission, engine._runtime.store
        with (
            admission._lock,
            engine._registry._lock,
            store._lock,
            engine._runtime.session_reader._lock,
        ):
            done = threading.Event()

            def drop():
                nonlocal waiting
                del waiting
                gc.collect()
                done.set()

            thread = threading.Thread(target=drop, daemon=True)
            thread.start()
            assert done.wait(20), "dropping a stream waits for a lock"
        second.stop()
        assert (second.turns, second.unanswered) == ((), "Wait")
        running.close()
        second.send("Wait", max_new_tokens=2)
        check_books(engine)


def test_an_interrupted_stop_is_finished_by_the_next_verb(engine):
    chat = engine.session()
    stream = chat.stream("Tell me", **LONG)
    next(stream)
    chat.running._cancelled = True  # and then Ctrl-C, before the engine has the cancel
    assert chat.send("Two", **GREEDY).finish_reason == "length"
    assert stream.reply.finish_reason == "cancelled"
    assert len(stream.reply.token_ids) < 3000


def test_a_deleted_session_is_not_found_and_a_renamed_one_is(engine):
    old = engine.session("a", settings=GREEDY)
    old.send("One")
    old.close()
    again = engine.session("a")
    old.delete()
    assert again.state is State.CLOSED  # it was the same conversation
    new = engine.session("a")
    for verb in (old.delete, again.delete):
        with pytest.raises(lmchat.NotFound, match="no session 'a'"):
            verb()
    assert engine.session("a") is new
    stream = new.stream("One", **LONG)
    next(stream)
    new.rename("b")
    assert engine.session("b") is new
    with pytest.raises(lmchat.SessionBusy):
        new.undo()
    engine.delete("b")
    assert stream.reply.finish_reason == "cancelled"
    assert new.state is State.CLOSED
    assert list(stream) is not None
    engine.session("v", template_variables={"self": 1})
    engine.session("v", template_variables={"self": 2})


def test_replies_are_equal_while_memory_is_short(folder, device):
    """Sessions that do not fit are evicted, and return with the same replies."""
    options = {**SETTINGS, "cache_memory": "2MiB", "max_batch_size": 4}
    texts = ["word " * 60, "Two", "other " * 40]
    with (
        lmchat.ChatEngine(folder, device=device, **options) as engine,
        lmchat.ChatEngine(folder, device=device, cache_memory="64MiB", **SETTINGS) as ample,
    ):
        wanted = []
        for number in range(12):
            chat = ample.session(settings=GREEDY)
            wanted.append([chat.send(f"{number} {text}").token_ids for text in texts])
        chats = [engine.session(settings=GREEDY) for _ in range(12)]
        for at, text in enumerate(texts):
            streams = [chat.stream(f"{n} {text}") for n, chat in enumerate(chats)]
            for n, stream in enumerate(streams):
                list(stream)
                assert stream.reply.token_ids == wanted[n][at], (n, at)
        assert all(chat.token_ids == ids_of(chat) for chat in chats)
        stats = engine.stats()
        assert sum(chat.length for chat in chats) > stats.max_context
        check_books(engine)


# --- asyncio --------------------------------------------------------------------------------------


def test_tasks_cancelled_at_every_await(folder, device):
    async def run():
        async with lmchat.AsyncChatEngine(
            folder, device=device, cache_memory="64MiB", **SETTINGS
        ) as engine:

            async def talk(chat):
                await chat.send("One", **GREEDY)
                async with chat.stream("Two", **GREEDY) as stream:
                    async for _ in stream:
                        pass
                async for _ in chat.stream("Three", **LONG):
                    break
                async with chat.stream("Four", **GREEDY) as stream:  # the third one still ends
                    await stream.stop()
                await chat.undo()
                await chat.retry(**GREEDY)
                await chat.set_system("Be brief.")
                await chat.close()

            cancelled = 0
            for steps in range(60):
                chat = await engine.session(f"cancelled {steps}")
                task = asyncio.create_task(talk(chat))
                for _ in range(steps):
                    await asyncio.sleep(0)
                    if steps % 2:
                        await asyncio.sleep(0.0005)
                task.cancel()
                [result] = await asyncio.gather(task, return_exceptions=True)
                assert result is None or isinstance(result, asyncio.CancelledError)
                cancelled += result is not None
                chat = await engine.session(chat.name)
                await chat.stop()
                await chat.send("Next", **GREEDY)
                if await chat.system() is None:
                    assert await chat.token_ids() == ids_of(chat.sync)
            assert cancelled > 20
            check_books(engine.sync)

    asyncio.run(run())


def test_leaving_a_stream_that_has_not_begun(folder, device):
    async def run():
        async with lmchat.AsyncChatEngine(
            folder, device=device, cache_memory="32MiB", **SETTINGS
        ) as engine:
            chat = await engine.session()
            async for _ in chat.stream("One", **LONG):
                break
            late = chat.stream("Two", **LONG)
            await late.aclose()
            assert [delta async for delta in late] == []
            async for _ in chat.stream("Three", **LONG):
                break
            async with chat.stream("Four", **LONG):
                pass
            await chat.stop()
            users = [turn.text for turn in await chat.turns() if turn.role == "user"]
            if chat.unanswered:  # it was stopped before its first token
                users.append(chat.unanswered)
            assert users == ["One", "Three", "Four"]

    asyncio.run(run())


def test_a_loop_that_ends_while_generations_run(engine):
    chats = [engine.session() for _ in range(4)]

    async def begin(chat):
        stream = AsyncReplyStream(lambda: chat.start_send("One", **LONG))
        await stream.__anext__()
        return stream

    async def run():
        return await asyncio.gather(*map(begin, chats))

    streams = asyncio.run(run())
    assert all(chat.state is State.DECODE for chat in chats)
    del streams
    for chat in chats:
        assert chat.send("Two", **GREEDY).finish_reason == "length"
        assert chat.token_ids == ids_of(chat)


def test_two_loops_share_an_engine(folder, device, engine):
    errors = []

    async def talk(number):
        chat = AsyncSession(engine.session(f"loop {number}"))
        for text in ("One", "Two"):
            reply = await chat.send(text, **GREEDY)
            async with chat.stream("More", **GREEDY) as stream:
                shown = [delta async for delta in stream]
            assert "".join(shown) == stream.reply.text
            assert reply.finish_reason == "length"
        assert await chat.token_ids() == ids_of(chat.sync)

    async def talks(first):
        await asyncio.gather(*(talk(first + i) for i in range(6)))

    def run(first):
        try:
            asyncio.run(talks(first))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_closing_the_engine_from_another_thread_while_all_begin(folder, device):
    for delay in (0.0, 0.002, 0.01):
        engine = lmchat.ChatEngine(folder, device=device, cache_memory="32MiB", **SETTINGS)
        outcomes = []

        def talk(number, engine=engine, outcomes=outcomes):
            try:
                while True:
                    if number % 2:
                        engine.generate([1, 2, number], **GREEDY)
                    else:
                        engine.session(f"s{number}").send("One", **GREEDY)
            except lmchat.Error as error:
                outcomes.append(error)

        threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(delay)
        engine.close()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert all(isinstance(e, lmchat.EngineClosed | lmchat.NotFound) for e in outcomes), outcomes
