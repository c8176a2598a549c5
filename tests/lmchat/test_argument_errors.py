"""Invalid arguments of the Python API raise errors with the value seen and the one expected."""

import asyncio

import pytest
from chat_models import chat_model

import lmchat

OPTIONS = {"cache_memory": "16MiB", "threads": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = chat_model(tmp_path_factory.mktemp("models") / "tiny")
    with lmchat.ChatEngine(folder, store="memory", **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"owner": 5}, "owner is 5, expected a string"),
        ({"search": ["x"]}, "search is ['x'], expected a string"),
        ({"tag": 5}, "tag is 5, expected a string"),
        ({"limit": -1}, "limit is -1, expected an integer of 0 or more, or None"),
        ({"limit": "5"}, "limit is '5', expected an integer of 0 or more, or None"),
        ({"limit": True}, "limit is True, expected an integer of 0 or more, or None"),
    ],
)
def test_a_list_of_sessions(engine, arguments, words):
    with pytest.raises(lmchat.InvalidRequest) as error:
        engine.sessions(**arguments)
    assert str(error.value) == words
    assert engine.sessions("nobody", search="x", tag="y", limit=0) == []


def test_bad_paths_of_archives_are_refused(engine):
    chat = engine.session()
    for act in (chat.export, engine.import_):
        with pytest.raises(lmchat.InvalidRequest, match="path is 5, expected the path of a file"):
            act(5)


def test_a_store_without_a_name_is_not_the_current_folder(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lmchat.InvalidRequest, match="store is '', expected 'disk', 'memory'"):
        lmchat.ChatEngine(engine.info.path, store="", **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_the_same_from_asyncio(engine):
    async def ask():
        async with lmchat.AsyncChatEngine(engine.info.path, store="memory", **OPTIONS) as door:
            with pytest.raises(lmchat.InvalidRequest, match="limit is -1"):
                await door.sessions(limit=-1)
            chat = await door.session()
            with pytest.raises(lmchat.InvalidRequest, match="path is 5"):
                await chat.export(5)

    asyncio.run(ask())
