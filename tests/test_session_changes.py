"""What changes under a session: its model, tokenizer or template, and a context that is full."""

from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
from chat_models import CHATML, chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
OPTIONS = {"dtype": "float32", "threads": 1, "cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def small(tmp_path_factory):
    """A model with a short context."""
    return chat_model(tmp_path_factory.mktemp("small"), context=512)


def opened(folder, device, **options):
    return lmchat.ChatEngine(folder, device=device, **{**OPTIONS, **options})


def by_hand(turns, backend=None):
    conversation = Conversation(backend or make_tokenizer())
    system = None
    for turn in turns:
        if turn.role == "system":
            system = turn.text
        elif turn.role == "user":
            conversation.user(turn.text, system)
        else:
            conversation.reply(list(turn.token_ids))
    return conversation.ids


# --- what changes between two processes ----------------------------------------------------------


def test_a_changed_template_is_noted_and_leaves_the_past_alone(folder, tmp_path, device):
    with opened(folder, device) as engine:
        chat = engine.session("trip", settings=GREEDY)
        assert chat.send("One").notices == ()
        assert chat.send("Two").notices == ()
        past = chat.token_ids
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = CHATML.replace("<|im_start|>assistant", "<|im_start|>bot")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    with opened(other, device) as engine:
        chat = engine.session("trip")
        reply = chat.send("Three")
        [notice] = [n for n in reply.notices if "template" in n]
        assert "earlier turns stay as they are" in notice
        assert chat.token_ids[: len(past)] == past
        bot = engine.tokenizer.encode("<|im_start|>bot\n")
        assert tuple(chat.turns[-2].token_ids[-len(bot) :]) == tuple(bot)
        assert chat.send("Four").notices == ()


def test_another_tokenizer_encodes_the_words_anew(folder, tmp_path, device):
    with opened(folder, device) as engine:
        chat = engine.session("trip", system="Be brief.", settings=GREEDY)
        chat.send("One")
        chat.send("Two")
        before, turns = chat.token_ids, chat.turns
    other = chat_model(tmp_path / "other")
    state = json.loads((other / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]  # the same words under other numbers
    names = [name for name in vocab if vocab[name] > 2]
    numbers = [vocab[name] for name in names]
    vocab |= dict(zip(names, numbers[::-1], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(state))
    backend = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))
    with opened(other, device) as engine:
        chat = engine.session("trip")
        assert chat.token_ids == before
        reply = chat.send("Three")
        assert [n for n in reply.notices if "encoded anew" in n]
        assert [(t.role, t.text) for t in chat.turns[:5]] == [(t.role, t.text) for t in turns]
        replies = [t for t in chat.turns if t.role == "assistant"]
        for turn in replies[:2]:
            ids = backend.encode(turn.text, add_special_tokens=False).ids
            assert list(turn.token_ids) == ids
        assert chat.token_ids == by_hand(chat.turns, backend)
        assert len(chat.branches(0)) == 2  # the old one is still there
        assert chat.send("Four").notices == ()
        ids = chat.token_ids
        chat.switch(0, 0)
        assert chat.token_ids == before
    with opened(folder, device) as engine:  # and back: the old branch is this tokenizer's
        chat = engine.session("trip")
        chat.send("Five")
        assert chat.token_ids == by_hand(chat.turns)
        assert chat.token_ids[: len(before)] == before
        chat.switch(0, 1)
        assert chat.token_ids == ids
        chat.send("Six")
        assert chat.token_ids == by_hand(chat.turns)


# --- a full context ------------------------------------------------------------------------------


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
            assert reply.usage.prompt_tokens <= 256 < length
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
