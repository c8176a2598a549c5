"""What was dropped from a full context: readers see it above the conversation, the title stays."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import pytest
from chat_models import chat_model

import lmchat
from lmchat.archive.document import from_document, to_document
from lmchat.errors import InvalidRequest
from lmchat.generation.reply_stream import ReplyStream
from lmchat.store.turns import TurnTree

SETTINGS = {"temperature": 0.0, "max_new_tokens": 8, "logit_bias": {0: -100.0, 2: -100.0}}
OPTIONS = {"threads": 1, "cache_memory": "32MiB", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("small"), context=512)


@pytest.fixture
def engine(model, tmp_path):
    with lmchat.ChatEngine(model, store=str(tmp_path / "store"), **OPTIONS) as engine:
        yield engine


def texts(turns):
    return [turn.text for turn in turns if turn.role != "system"]


def filled(chat, drops=2):
    """Sends messages until rounds were dropped so often. Returns all texts in order."""
    said, number = [], 0
    while drops:
        number += 1
        reply = chat.send(f"{number} " + "word " * 8)
        said += [f"{number} " + "word " * 8, reply.text]
        drops -= bool(reply.notices)
    return said


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_nothing_that_was_said_leaves_the_view(model, tmp_path, system):
    store = str(tmp_path)
    with lmchat.ChatEngine(model, store=store, **OPTIONS) as engine:
        chat = engine.session("trip", system=system, settings=SETTINGS, overflow="drop")
        said = filled(chat)
        title = chat.title
        assert title.startswith("1 word")
        assert len(chat.turns) < len(said)
        assert texts(chat.dropped) + texts(chat.turns) == said
        assert all(turn.role != "system" for turn in chat.dropped)
        assert [one.title for one in engine.sessions()] == [title]
        assert [one.name for one in engine.sessions(search="1")] == ["trip"]
    with lmchat.ChatEngine(model, store=store, **OPTIONS) as engine:
        chat = engine.session("trip")
        assert texts(chat.dropped) + texts(chat.turns) == said
        assert chat.title == title
        chat.undo()
        assert texts(chat.dropped) + texts(chat.turns) == said[:-2]


def test_other_verbs_keep_the_link(engine, tmp_path):
    chat = engine.session("trip", settings=SETTINGS, overflow="drop")
    said = filled(chat)
    above = chat.dropped
    copy = chat.fork("copy")
    assert copy.dropped == above
    assert copy.title == chat.title
    chat.edit(0, "Other words.")
    assert texts(chat.dropped) == texts(above)
    assert chat.turns[0].text == "Other words."
    chat.switch(0, 0 if chat.branches(0)[0].active is False else 1)
    chat.retry()
    assert chat.title.startswith("1 word")
    copy.set_system("Be kind.")
    copy.send("So?")
    assert texts(copy.dropped) == texts(above)
    assert texts(copy.dropped) + texts(copy.turns)[:-2] == said
    path = tmp_path / "trip.zip"
    copy.export(path)
    brought = engine.import_(path, "brought")
    assert texts(brought.dropped) == texts(above)
    with zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read("session.json"))
    assert document["version"] == 3


def test_where_nothing_stays(engine):
    chat = engine.session("trip", settings=SETTINGS, overflow="drop")
    said = ["One", chat.send("One").text]
    reply = chat.send("word " * 162)  # alone it fits, and nothing beside it
    assert "nothing stays" in reply.notices[0]
    assert texts(chat.dropped) == said
    assert len(chat.turns) == 2
    assert chat.title == "One"


def test_rounds_that_came_with_the_message_are_dropped_after_the_stored_ones(engine):
    chat = engine.session("trip", settings=SETTINGS, overflow="drop")
    said = ["One", chat.send("One").text]
    messages = [
        {"role": "user", "content": "word " * 100},
        {"role": "assistant", "content": "word " * 60},
    ]
    reply = ReplyStream(chat.start_send("Two", before=messages)).result()
    assert "dropped" in reply.notices[0]
    assert texts(chat.dropped) == said


def test_an_archive_with_a_wrong_link_is_refused(engine):
    chat = engine.session("trip", settings=SETTINGS, overflow="drop")
    filled(chat, drops=1)
    document = to_document(chat._record)
    assert texts(from_document(document, "me").tree.dropped(chat.turns)) == texts(chat.dropped)
    linked = next(turn for turn in document["turns"] if "dropped_before" in turn)
    for version, value in ((3, linked["id"]), (3, linked["id"] + 1), (3, 1.0), (2, 1)):
        changed = json.loads(json.dumps(document))
        changed["version"] = version
        for turn in changed["turns"]:
            if "dropped_before" in turn:
                turn["dropped_before"] = value
        with pytest.raises(InvalidRequest, match="dropped_before"):
            from_document(changed, "me")


def test_a_damaged_link_ends_the_view():
    chat = lmchat.Turn(1, None, "user", "a", {})
    for link in (1, 2, 7):
        tree = TurnTree.of([replace(chat, dropped_before=link)])
        assert tree.dropped(tree.path(1)) == []
