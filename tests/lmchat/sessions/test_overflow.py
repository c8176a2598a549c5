"""A context that is full: refused, or the oldest turns are dropped."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.generation.idle_prefill import IdlePrefill
from lmchat.page_size import PAGE_TOKENS as PAGE
from lmchat.sessions.overflow import notice
from lmchat.sessions.planner import Dropped
from lmchat.store.sqlite.sqlite_store import SqliteStore
from lmchat.store.turns import Usage
from turbomind import Event, Stream

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
OPTIONS = {"threads": 1, "cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model with a short context."""
    return chat_model(tmp_path_factory.mktemp("small"), context=512)


def opened(folder, device, **options):
    return lmchat.ChatEngine(folder, device=device, **{**OPTIONS, **options})


def by_hand(turns):
    conversation = Conversation(make_tokenizer())
    system = None
    for turn in turns:
        if turn.role == "system":
            system = turn.text
        elif turn.role == "user":
            conversation.user(turn.text, system)
        else:
            conversation.reply(list(turn.token_ids))
    return conversation.ids


def filled(engine, name="trip", system=None, **settings):
    """A session that drops its oldest turns, with the next one."""
    chat = engine.session(name, system=system, settings=GREEDY, overflow="drop")
    while chat.length < 470:
        assert not chat.send("word " * 8).notices
    chat.set(**settings)
    return chat


def test_a_full_context_is_refused(small, device):
    with opened(small, device) as engine:
        chat = engine.session("trip", settings=GREEDY)
        while chat.length < 460:
            chat.send("word " * 8)
        ids = chat.token_ids
        with pytest.raises(lmchat.ContextFull):
            chat.send("word " * 8)
        assert chat.token_ids == ids
        with pytest.raises(lmchat.InvalidRequest, match="overflow is 'slide'"):
            chat.set_overflow("slide")


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_the_oldest_turns_are_dropped(small, device, system):
    with opened(small, device) as engine:
        chat = engine.session("trip", system=system, settings=GREEDY)
        chat.set_overflow("drop")
        dropped = 0
        for number in range(25):
            before = [t.text for t in chat.turns if t.role == "user"]
            length, prefilled = chat.length, engine.stats().tokens_prefilled
            reply = chat.send(f"{number} " + "word " * 8)
            after = [t.text for t in chat.turns if t.role == "user"]
            assert chat.system == system
            assert chat.token_ids == by_hand(chat.turns)
            assert chat.length <= 512
            if not reply.notices:
                assert after[:-1] == before
                continue
            dropped += 1
            [notice] = reply.notices
            gone = len(before) - len(after) + 1
            assert after[:-1] == before[gone:]
            assert f"the oldest {gone} turns were dropped" in notice
            asked = len(chat.turns[-2].token_ids)
            assert reply.usage.prompt_tokens - asked <= 256 < length
            computed = engine.stats().tokens_prefilled - prefilled
            assert computed <= reply.usage.prompt_tokens + PAGE  # some of it by idle prefill
        assert 2 <= dropped <= 5
        ids = chat.token_ids
    with opened(small, device) as engine:
        assert engine.session("trip").token_ids == ids


@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        (Dropped(1, 20_000, 0), "the oldest turn was dropped (20,000 tokens), nothing stays"),
        (
            Dropped(2, 900, 1_000),
            "the oldest 2 turns were dropped (900 tokens); of the 1,000 tokens that stay 300 were "
            "computed again",
        ),
    ],
)
def test_what_was_dropped_is_reported(dropped, words):
    assert notice(dropped, Usage(cached_tokens=700)) == f"the context is full: {words}"


def test_a_turn_that_does_not_fit_alone(small, device):
    with opened(small, device) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.set_overflow("drop")
        chat.send("One")
        ids = chat.token_ids
        for text, settings, words in (
            ("word " * 300, {}, r"the turn alone would be \d+ tokens long, expected less than 512"),
            ("Two", {"max_new_tokens": 600}, r"max_new_tokens is 600, expected at most \d+ after"),
        ):
            with pytest.raises(lmchat.ContextFull, match=words):
                chat.send(text, **settings)
            assert chat.token_ids == ids
        assert chat.send("Two").finish_reason == "length"


def test_dropping_for_each_verb(small, device):
    long = {**GREEDY, "max_new_tokens": 60}
    with opened(small, device) as engine:
        for verb in ("continue", "retry", "edit"):
            chat = engine.session(verb, settings=GREEDY)
            while chat.length < 460:
                chat.send("word " * 8)
            chat.set_overflow("drop")
            users = [t.text for t in chat.turns if t.role == "user"]
            last = chat.turns[-1]
            reply = {
                "continue": lambda chat=chat: chat.continue_(**long),
                "retry": lambda chat=chat: chat.retry(**long),
                "edit": lambda chat=chat, users=users: chat.edit(len(users) - 1, "Other", **long),
            }[verb]()
            assert "dropped" in reply.notices[0]
            assert chat.token_ids == by_hand(chat.turns)
            left = [t.text for t in chat.turns if t.role == "user"]
            assert len(left) < len(users)
            assert left[-1] == ("Other" if verb == "edit" else users[-1])
            if verb == "continue":
                assert tuple(reply.token_ids[: len(last.token_ids)]) == last.token_ids
                assert len(reply.token_ids) == len(last.token_ids) + 60


# --- a turn that fails ---------------------------------------------------------------------------


def everything(chat, data_dir):
    """Returns the session's state in memory and in the store."""
    store = SqliteStore(data_dir)
    record = store.find("local", chat.name)
    store.close()
    return chat.turns, {t.id: t for t in chat._record.tree}, {t.id: t for t in record.tree}


def failing(monkeypatch):
    """Every request fails before its first token."""
    poll = Stream.poll
    broken = Event(finish_reason="error", error=lmchat.ModelError("no numbers"), terminal=True)
    monkeypatch.setattr(
        Stream, "poll", lambda stream: [broken for event in poll(stream) if event.terminal]
    )


@pytest.mark.parametrize("verb", ["send", "continue", "retry", "edit"])
def test_a_turn_that_fails_leaves_no_shorter_past(small, device, data_dir, monkeypatch, verb):
    long = {"max_new_tokens": 60}
    with opened(small, device) as engine:
        chat = filled(engine)
        last = sum(turn.role == "user" for turn in chat.turns) - 1
        before = everything(chat, data_dir)
        verbs = {
            "send": lambda: chat.send("word " * 8, **long),
            "continue": lambda: chat.continue_(**long),
            "retry": lambda: chat.retry(**long),
            "edit": lambda: chat.edit(last, "Other " * 20, **long),
        }
        with monkeypatch.context() as patch:
            failing(patch)
            with pytest.raises(lmchat.ModelError, match="no numbers"):
                verbs[verb]()
        assert everything(chat, data_dir) == before
        chat.fork("copy").send("One", max_new_tokens=1)
        chat.set_title("Full")
        [notice] = verbs[verb]().notices
        assert "dropped" in notice
        assert chat.token_ids == by_hand(chat.turns)
        after = chat.turns
    with opened(small, device) as engine:
        chat = engine.session("trip")
        assert chat.turns == after
        if verb == "send":
            chat.undo()
        chat.switch(0, 0)
        assert chat.turns == before[0]


def test_killed_after_a_shorter_past(small, device, data_dir, monkeypatch):
    """The journal has the rebuilt past, from which the reply continues."""
    for count in (0, 1, 30):
        name = f"trip {count}"
        with opened(small, device, store="memory") as engine:
            whole = filled(engine, name, max_new_tokens=40).send("And now?")
        with opened(small, device) as engine:
            chat = filled(engine, name, max_new_tokens=40)
            before = everything(chat, data_dir)
            with monkeypatch.context() as patch:  # the process dies: nothing is acknowledged
                store = engine._runtime.store
                patch.setattr(store, "finish", lambda *_: dying())
                patch.setattr(store, "change", lambda *_: dying())
                patch.setattr(store, "release", lambda _lease: None)
                journal, left = store.journal, [count]

                def some(tokens, journal=journal, left=left):
                    for lease, ids in tokens:
                        taken = ids[: left[0]]
                        left[0] -= len(taken)
                        if taken:
                            journal([(lease, taken)])
                    return []

                patch.setattr(store, "journal", some)
                chat.send("And now?")
                engine.close()
        with opened(small, device) as engine:
            chat = engine.session(name)
            if not count:
                assert chat.unanswered == "And now?"
                assert everything(chat, data_dir) == before
                continue
            assert list(chat.turns[-1].token_ids) == whole.token_ids[:count]
            assert chat.continue_().token_ids == whole.token_ids
            assert chat.token_ids == by_hand(chat.turns)


def dying():
    raise lmchat.StoreError("the process is dead")


# --- idle prefill of what stays -----------------------------------------------------------------


def wait_for_rest(engine):
    """Waits until idle prefill has nothing to compute."""
    idle = engine._runtime.idle_prefill
    deadline = time.monotonic() + 60
    while any(w.make for w in idle._entries.values()) or idle._running or idle._making:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_the_next_turn_finds_what_stays(small, device, data_dir, system):
    """It pays its own tokens and less than a page; nothing is recorded before it."""
    text = "And now? " * 5
    with opened(small, device, store="memory", prefix_reuse=False) as engine:
        whole = filled(engine, system=system)
        wait_for_rest(engine)
        assert engine._runtime.idle_prefill._entries == {}  # it would not be found
        reply = whole.send(text)
        assert reply.usage.cached_tokens < PAGE
        wanted = reply.token_ids
    with opened(small, device) as engine:
        chat = filled(engine, system=system)
        wait_for_rest(engine)
        before = everything(chat, data_dir)
        assert chat.turns == before[0]
        assert engine.stats().pages_cached >= 3
        prefilled = engine.stats().tokens_prefilled
        reply = chat.send(text)
        asked = len(chat.turns[-2].token_ids)
        assert engine.stats().tokens_prefilled - prefilled < asked + PAGE
        assert reply.token_ids == wanted
        stayed = reply.usage.prompt_tokens - asked
        assert 0 < stayed - reply.usage.cached_tokens < PAGE
        assert f"{stayed - reply.usage.cached_tokens} were computed again" in reply.notices[0]
        assert chat.token_ids == by_hand(chat.turns)
        assert set(before[1]) < set(everything(chat, data_dir)[1])
        chat.delete()
        engine.core.flush_pages()
        stats = engine.stats()
        assert (stats.pages_cached, stats.pages_referenced) == (0, 0)


def test_requests_beside_what_is_computed_ahead(device, tmp_path):
    """They answer what they answer alone, and the books balance."""
    folder = chat_model(tmp_path, context=2048)

    def answers(overflow):
        with opened(folder, device, store="memory", prefill_chunk=16) as engine:
            other = engine.session("other", settings=GREEDY)
            chat = engine.session("trip", settings=GREEDY, overflow=overflow)
            chat.send("word " * 350)
            assert 1850 < chat.send("word " * 270).usage.prompt_tokens < 1950
            found = [other.send("One").token_ids]
            found.append(engine.generate([5, 6, 7], max_new_tokens=3, temperature=0).token_ids)
            found.append(engine.score([5, 6, 7]))
            found.append(other.send("Two").token_ids)
            found.append(chat.send("Two", max_new_tokens=2).token_ids)
            chat.delete()
            other.delete()
            if overflow == "drop":
                wait_for_rest(engine)
            engine.core.check_invariants()
        return found

    assert answers("drop") == answers("refuse")


def group(free, window=0, out_of_reach=0):
    return SimpleNamespace(free=free, window=window, out_of_reach=out_of_reach)


class FakeCore:
    """An engine in which a prompt is computed until `stream` gets its end."""

    prefill_chunk = 512

    def __init__(self, *groups):
        self.groups, self.prompts, self.cancelled = groups, [], []

    def stats(self):
        return SimpleNamespace(groups=self.groups)

    def stream(self, prompt, *, priority, **_params):
        assert priority > 1
        self.prompts.append(prompt)
        return SimpleNamespace(cancel=lambda: self.cancelled.append(prompt))


class FakeReader:
    """Does all of it at once."""

    inbox = None

    def watch(self, make, consumer):
        consumer.attach(make())
        self.consumer = consumer

    def later(self, work):
        work()

    call = later


@pytest.fixture
def world():
    core, reader, queue = FakeCore(group(10)), FakeReader(), []
    world = SimpleNamespace(core=core, reader=reader, idle=True, queue=queue)
    world.idle_prefill = IdlePrefill(core, reader, lambda: world.idle, queue.append)
    world.help = lambda: [queue.pop(0)() for _ in list(queue)]
    world.end = lambda reason: reader.consumer.feed([Event(finish_reason=reason, terminal=True)])
    return world


def test_a_request_stops_what_is_computed_ahead(world):
    idle, core = world.idle_prefill, world.core
    idle.enqueue("a", "me", lambda: [1, 2, 3])
    idle.enqueue("b", "me", lambda: [4] * 100)
    idle.resume()
    idle.resume()
    world.help()
    assert core.prompts == [[1, 2, 3]]
    world.idle = False
    idle.stop()
    assert core.cancelled == [[1, 2, 3]]
    world.end("cancelled")
    idle.resume()
    assert world.queue == []  # not before the request has ended
    world.idle = True
    idle.resume()
    world.idle = False
    world.help()  # a request came while the prompt was made
    assert core.prompts == [[1, 2, 3]]
    world.idle = True
    idle.resume()
    world.help()
    assert core.prompts == [[1, 2, 3]] * 2
    with idle.held():
        assert core.cancelled == [[1, 2, 3]] * 2
        world.end("cancelled")
        assert world.queue == []
    world.help()
    world.end("length")
    world.help()
    assert core.prompts == [[1, 2, 3]] * 3 + [[4] * 100]
    assert idle.forget("b") == [[4] * 100]
    assert core.cancelled[-1] == [4] * 100
    world.end("cancelled")
    assert world.queue == []
    idle.enqueue("a", "me", lambda: [1, 2, 3, 4])
    idle.resume()
    world.help()
    world.end("error")
    assert idle.forget("a") == [[1, 2, 3, 4]]  # its pages are also those of the shorter one
    assert world.queue == []


@pytest.mark.parametrize(
    ("free", "window", "out_of_reach", "tokens", "runs"),
    [
        (2, 2, 0, 127, True),
        (2, 2, 0, 128, False),
        (1, 10, 0, 64, False),
        (10, 9, 1, 639, True),
        (10, 9, 0, 639, False),
        (40, 6, 6, 2000, True),
        (40, 6, 5, 2000, False),
    ],
)
def test_room_for_what_is_computed_ahead(world, free, window, out_of_reach, tokens, runs):
    """A window of 128 tokens, however long the prompt is, needs 12 pages for it and a chunk."""
    world.core.groups = (group(free), group(window, 128, out_of_reach))
    world.idle_prefill.enqueue("a", "me", lambda: [1] * tokens)
    world.idle_prefill.resume()
    world.help()
    assert bool(world.core.prompts) is runs


def test_a_prompt_that_cannot_be_made(world):
    world.idle_prefill.enqueue("a", "me", lambda: 1 // 0)
    world.idle_prefill.enqueue("b", "me", list)
    world.idle_prefill.enqueue("c", "me", lambda: [7])
    world.idle_prefill.resume()
    while world.queue:
        world.help()
    assert world.core.prompts == [[7]]


def test_nothing_useful_leaves_for_what_is_computed_ahead(small, device):
    with opened(small, device, cache_pages=11) as engine:
        engine.session("other", settings=GREEDY).send("One " * 20)
        chat = filled(engine)
        wait_for_rest(engine)
        assert engine._runtime.idle_prefill.forget(chat._record.id) == []
        assert 0 < engine.stats().pages_free < 3
        assert "computed again" in chat.send("And now?").notices[0]


def test_a_closed_session_wants_nothing(small, device):
    with opened(small, device) as engine:
        chat = filled(engine)
        chat.close()
        wait_for_rest(engine)
        assert engine._runtime.idle_prefill._entries == {}
