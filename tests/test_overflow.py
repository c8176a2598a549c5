"""A context that is full: refused, or the oldest turns are dropped."""

from __future__ import annotations

import pytest
from chat_models import chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.durable.sqlite_store import SqliteStore
from turbomind import Event, Stream

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
OPTIONS = {"dtype": "float32", "threads": 1, "cache_memory": "32MiB"}


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


def filled(engine, name="trip", **settings):
    """A session that drops its oldest turns, with the next one."""
    chat = engine.session(name, settings=GREEDY, overflow="drop")
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
            assert engine.stats().tokens_prefilled - prefilled <= reply.usage.prompt_tokens
        assert 2 <= dropped <= 5
        ids = chat.token_ids
    with opened(small, device) as engine:
        assert engine.session("trip").token_ids == ids


def test_a_turn_that_does_not_fit_alone(small, device):
    with opened(small, device) as engine:
        chat = engine.session("trip", settings=GREEDY)
        chat.set_overflow("drop")
        chat.send("One")
        ids = chat.token_ids
        for text, settings in (("word " * 300, {}), ("Two", {"max_new_tokens": 600})):
            with pytest.raises(lmchat.ContextFull):
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


def everything(chat, home):
    """What the session is, here and in the store."""
    kept = SqliteStore(home)
    record = kept.find("local", chat.name)
    kept.close()
    return chat.turns, {t.id: t for t in chat._record.tree}, {t.id: t for t in record.tree}


def failing(monkeypatch):
    """Every request fails before its first token."""
    poll = Stream.poll
    broken = Event(finish_reason="error", error=lmchat.ModelError("no numbers"), terminal=True)
    monkeypatch.setattr(
        Stream, "poll", lambda stream: [broken for event in poll(stream) if event.terminal]
    )


@pytest.mark.parametrize("verb", ["send", "continue", "retry", "edit"])
def test_a_turn_that_fails_leaves_no_shorter_past(small, device, home, monkeypatch, verb):
    long = {"max_new_tokens": 60}
    with opened(small, device) as engine:
        chat = filled(engine)
        last = sum(turn.role == "user" for turn in chat.turns) - 1
        before = everything(chat, home)
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
        assert everything(chat, home) == before
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


def test_killed_behind_a_shorter_past(small, device, home, monkeypatch):
    """The journal holds the past that was told again: the reply goes on from it."""
    for count in (0, 1, 30):
        name = f"trip {count}"
        with opened(small, device, store="memory") as engine:
            whole = filled(engine, name, max_new_tokens=40).send("And now?")
        with opened(small, device) as engine:
            chat = filled(engine, name, max_new_tokens=40)
            before = everything(chat, home)
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

                patch.setattr(store, "journal", some)
                chat.send("And now?")
                engine.close()
        with opened(small, device) as engine:
            chat = engine.session(name)
            if not count:
                assert chat.unanswered == "And now?"
                assert everything(chat, home) == before
                continue
            assert list(chat.turns[-1].token_ids) == whole.token_ids[:count]
            assert chat.continue_().token_ids == whole.token_ids
            assert chat.token_ids == by_hand(chat.turns)


def dying():
    raise lmchat.StoreError("the process is dead")
