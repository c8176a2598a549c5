"""What a session of this process and one behind a server do by the same code."""

import pickle

import pytest
from chat_models import chat_model
from http_server import RunningServer

import lmchat
from lmchat.server import ServerConfig

OPTIONS = {"threads": 1, "cache_memory": "32MiB"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 6}
ENDLESS = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 40_000}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    model = str(chat_model(tmp_path_factory.mktemp("models") / "tiny", context=200_000))
    with (
        lmchat.ChatEngine(model, store="memory", **OPTIONS) as local,
        RunningServer(ServerConfig(), model, **OPTIONS) as server,
        lmchat.connect(server.url) as remote,
    ):
        yield {"local": local, "remote": remote}


@pytest.fixture(params=["local", "remote"])
def engine(request, engines):
    engine = engines[request.param]
    yield engine
    for info in engine.sessions():
        engine.delete(info.name)


@pytest.fixture
def chat(engine):
    chat = engine.session("trip", system="Be brief.")
    chat.send("hello", **GREEDY)
    return chat


def test_both_are_of_the_exported_types(engine, chat):
    assert isinstance(engine, lmchat.EngineApi)
    assert isinstance(chat, lmchat.SessionApi)
    assert (engine.session_by_name("trip").id, chat.owner) == (chat.id, "local")
    assert engine.session_by_id(chat.id, owner=None).id == chat.id
    for one in (engine, chat):
        with pytest.raises(TypeError, match=f"a {type(one).__name__} cannot be copied or pickled"):
            pickle.dumps(one)


def test_update_changes_all_in_one_transaction(chat):
    before, tokens = chat.revision, chat.turns[-1].token_ids
    chat.update(title="Kyoto", system="Be long.", pinned=True, settings={"seed": 3}, tags=["a"])
    assert chat.revision == before + 1
    assert (chat.title, chat.system, chat.pinned, chat.tags) == ("Kyoto", "Be long.", True, ("a",))
    assert chat.settings == {"seed": 3}
    assert chat.turns[-1].token_ids == tokens
    chat.update(system="", settings={"seed": None})
    assert (chat.system, chat.settings, chat.title) == (None, {}, "Kyoto")
    chat.set_system("Be brief.")
    chat.set_system("")
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]


def test_a_refused_property_changes_none(chat):
    before = chat.revision
    refusals = {
        "pinned": {"pinned": "yes"},
        "overflow": {"overflow": "some"},
        "system": {"system": 3},
        "top_k": {"settings": {"top_k": -1}},
    }
    for name, changes in refusals.items():
        with pytest.raises(lmchat.InvalidRequest) as refused:
            chat.update(title="other", **changes)
        assert refused.value.param == name
    for refuse in (chat.set_overflow, chat.set_history, chat.set_title):
        with pytest.raises(lmchat.InvalidRequest):
            refuse(None)
    with chat.stream("more", **ENDLESS) as stream:
        next(stream)
        with pytest.raises(lmchat.SessionBusy):
            chat.update(title="other", system="Be long.")
    chat.refresh()
    assert (chat.title, chat.system, chat.pinned) == ("hello", "Be brief.", False)
    assert chat.turns[-1].finish_reason == "cancelled"
    assert chat.revision > before


STREAMED = {
    "send": ("stream", ("more",)),
    "retry": ("stream_retry", ()),
    "edit": ("stream_edit", (0, "Good day")),
    "continue_": ("stream_continue", ()),
}


@pytest.mark.parametrize("verb", STREAMED)
def test_a_streamed_verb_gives_what_the_verb_gives(engine, chat, verb):
    name, given = STREAMED[verb]
    whole = getattr(engine.session_by_name("trip").fork("other"), verb)(*given, **GREEDY)
    with getattr(chat, name)(*given, **GREEDY) as stream:
        text = "".join(stream)
    assert stream.reply.token_ids == whole.token_ids
    assert whole.text.endswith(text)
    assert stream.reply.finish_reason == whole.finish_reason == "length"
    with getattr(chat, name)(*given, **ENDLESS) as stream:
        next(stream)
    assert stream.reply.finish_reason == "cancelled"
    assert chat.running is None


def test_a_streamed_chat_gives_what_chat_gives(engine):
    messages = [{"role": "user", "content": "hello"}]
    whole = engine.chat(messages, owner=None, **GREEDY)
    with engine.stream_chat(messages, **GREEDY) as stream:
        assert "".join(stream) == whole.text
    with engine.stream_chat(messages, **ENDLESS) as stream:
        next(stream)
    assert stream.reply.finish_reason == "cancelled"


@pytest.mark.parametrize("verb", ["send", "retry", "edit", "continue_"])
def test_stream_is_no_setting(chat, verb):
    given = {"send": ("more",), "edit": (0, "more")}.get(verb, ())
    with pytest.raises(lmchat.InvalidRequest, match="unknown setting 'stream'"):
        getattr(chat, verb)(*given, stream=True)
