"""Sessions whose model, tokenizer or template has changed."""

from __future__ import annotations

import contextlib
import json
import shutil

import numpy as np
import pytest
import tokenizers
from chat_models import CHATML, chat_model, make_tokenizer
from chat_reference import Conversation

import lmchat
from lmchat.store.sqlite.sqlite_store import SqliteStore

NO_END = {0: -100.0, 2: -100.0}
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": NO_END}
OPTIONS = {"threads": 1, "cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


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


def with_other_tokenizer(folder):
    """Returns a model with the same words under other numbers, and its tokenizer."""
    other = chat_model(folder)
    state = json.loads((other / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]  # the same words under other numbers
    names = [name for name in vocab if vocab[name] > 2]
    numbers = [vocab[name] for name in names]
    vocab |= dict(zip(names, numbers[::-1], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(state))
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"] + "{# another #}"  # renders all turns again
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    return other, tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))


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


def test_another_tokenizer_encodes_the_words_again(folder, tmp_path, device):
    with opened(folder, device) as engine:
        chat = engine.session("trip", system="Be brief.", settings=GREEDY)
        chat.send("One")
        chat.send("Two")
        before, turns = chat.token_ids, chat.turns
    other, backend = with_other_tokenizer(tmp_path / "other")
    with opened(other, device) as engine:
        chat = engine.session("trip")
        assert chat.token_ids == before
        with pytest.raises(lmchat.ContextFull):
            chat.send("Three", max_new_tokens=1 << 30)
        assert (chat.turns, len(chat.branches(0))) == (
            turns,
            1,
        )  # a turn that fails changes nothing
        reply = chat.send("Three")
        assert [n for n in reply.notices if "encoded again" in n]
        assert not [n for n in reply.notices if "earlier turns stay" in n]
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


def test_another_tokenizer_encodes_the_branch_that_is_answered(folder, tmp_path, device):
    with opened(folder, device) as engine:
        chat = engine.session("trip", settings=GREEDY)
        first = chat.send("One").turn.id
        chat.send("Two")
    other, backend = with_other_tokenizer(tmp_path / "other")
    with opened(other, device) as engine:
        chat = engine.session("trip")
        chat.start_send("Three", after=first).wait()
        assert [turn.text for turn in chat.turns if turn.role == "user"] == ["One", "Three"]
        assert chat.token_ids == by_hand(chat.turns, backend)


def test_a_session_stores_how_its_model_was_loaded(folder, tmp_path):
    """As plain values: an engine also takes numpy's integers, which no store does."""
    options = {"quantize": "int4", "group_size": np.int64(32), "seed": np.uint64(7)}
    loaded = {"quantize": "int4", "group_size": 32, "seed": 7}
    for given, stored in ((options, loaded), ({"quantize": "none", "dtype": "auto"}, {})):
        with opened(folder, "cpu", store=str(tmp_path), **given) as engine:
            chat = engine.session("trip")
            assert chat.send("One", **GREEDY).error is None
            assert chat.fork()._record.loading == stored
        with contextlib.closing(SqliteStore(tmp_path)) as store:
            assert store.find("local", "trip").loading == stored
