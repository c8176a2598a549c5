"""Sessions of a model with another vocabulary, beside those of the model that runs."""

from __future__ import annotations

import pytest
from chat_models import chat_model

import lmchat
from lmchat.server.forecasts import forecasts_by_id
from lmchat.sessions.session_writer import Change
from turbomind import Residence

OPTIONS = {"threads": 1, "cache_memory": "32MiB", "device": "cpu"}
SHORT = {"max_new_tokens": 4}
NOTHING = Residence(0, 0, 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a session of memo, whose token ids another model does not have."""
    folder = tmp_path_factory.mktemp("store")
    with lmchat.ChatEngine(store=str(folder), **OPTIONS) as engine:
        engine.session("foreign").send("My dog is called Waffles.", **SHORT)
        engine.session("brought", settings={"stop_token_ids": [4000]}).send("Hello.", **SHORT)
    return folder


@pytest.fixture(scope="module")
def engine(store, tmp_path_factory):
    model = chat_model(tmp_path_factory.mktemp("other"))
    with lmchat.ChatEngine(model, store=str(store), **OPTIONS) as engine:
        engine.session("own").send("Hello.", **SHORT)
        yield engine


def test_forecasts_skip_a_foreign_session(engine):
    own, foreign = engine.session("own"), engine.session("foreign")
    assert max(foreign.token_ids) >= engine.core.vocab_size
    costs = engine.forecasts([foreign, own, foreign])
    assert costs[1] == engine.forecasts([own])[0]
    assert costs[1].residence.device > 0
    for cost in (costs[0], costs[2]):
        assert (cost.residence, cost.ttft) == (NOTHING, 0.0)
    assert engine.residences([foreign, own]) == [NOTHING, own.residence]
    assert engine.predicted_ttfts([foreign])[0] == 0.0
    assert (foreign.residence, foreign.predicted_ttft()) == (NOTHING, 0.0)
    foreign.warm()


def test_forecasts_of_a_list_leave_out_what_is_gone_or_foreign(engine):
    own, foreign, gone = (engine.session(name) for name in ("own", "foreign", "gone"))
    engine.delete("gone")
    costs = forecasts_by_id(engine, [foreign.id, own.id, gone.id, "0" * 32], "local")
    assert list(costs) == [own.id]
    assert costs[own.id].residence == own.residence
    assert forecasts_by_id(engine, [own.id], "another") == {}


def test_a_session_of_another_tokenizer_with_equal_ids_is_foreign(engine):
    """Equal ids of another tokenizer are other words: nothing of them is cached."""
    own = engine.session("own").fork("as another")
    assert engine.residences([own])[0].device > 0
    own._change(lambda: Change(None, {"tokenizer": "of another"}))
    assert (own.residence, forecasts_by_id(engine, [own.id], "local")) == (NOTHING, {})


def test_a_foreign_session_answers_and_is_one_of_this_model_then(engine):
    chat = engine.session("foreign").fork("continued")
    reply = chat.send("Go on.", **SHORT)
    assert "another tokenizer" in " ".join(reply.notices)
    assert engine.forecasts([chat])[0].residence.device > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop_token_ids": [10**6]}, r"stop_token_ids\[0\] is 1000000, expected a token id"),
        ({"temperature": 0.5, "stop_token_ids": [4, -7]}, r"stop_token_ids\[1\] is -7, expected"),
        ({"eos_token_ids": [5, 10**6]}, r"eos_token_ids\[1\] is 1000000"),
        ({"bad_words": [[4], [5, 10**6]]}, r"bad_words\[1\]\[1\] is 1000000, expected a token id"),
        (
            {"logit_bias": {4: 1.0, 10**6: -1.0}},
            r"logit_bias\.1000000 is -1\.0, expected the bias of",
        ),
        ({"max_new_tokens": 10**6}, "max_new_tokens is 1000000, expected less than 4096"),
        ({"min_new_tokens": 10**6}, "min_new_tokens is 1000000, expected less than 4096"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, expected at most"),
    ],
)
def test_a_setting_that_no_reply_can_use_is_refused_when_it_is_set(engine, settings, words):
    chat = engine.session("set", settings={"top_k": 3})
    for change in (
        lambda: chat.set(**settings),
        lambda: chat.update(title="other", settings=settings),
        lambda: engine.session("set", settings=settings),
        lambda: engine.session("never", settings=settings),
    ):
        with pytest.raises(lmchat.InvalidRequest, match=words):
            change()
    assert (chat.settings, chat.title) == ({"top_k": 3}, "")
    with pytest.raises(lmchat.NotFound):
        engine.session_by_name("never")
    chat.send("Hello.", **SHORT)
    chat.undo()


def test_a_change_of_another_setting_is_not_refused_for_an_old_one(engine):
    """Another model may have set ids that this one does not have."""
    chat = engine.session("brought")
    assert chat.settings == {"stop_token_ids": [4000]}
    chat.set(temperature=0.5)
    assert chat.settings["temperature"] == 0.5
    chat.set(stop_token_ids=None)
    assert len(chat.send("Hello.", **SHORT).token_ids) > 0


def test_lists_name_the_model_of_each_session(engine):
    models = {one.name: one.model for one in engine.sessions()}
    assert models["foreign"] == "memo"
    assert models["own"] == engine.model != "memo"
