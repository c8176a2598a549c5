"""Ids, revisions and metadata of sessions, and requests about many of them."""

import dataclasses

import pytest

import lmchat
from lmchat.errors import InvalidRequest, NotFound

GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with lmchat.ChatEngine("memo", store="memory", threads=1, cache_memory="16MiB") as engine:
        yield engine


def test_a_session_is_opened_by_its_id(engine):
    session = engine.session("by-id", metadata={"topic": "x"})
    assert len(session.id) == 32
    assert int(session.id, 16)
    assert engine.session_by_id(session.id) is session
    session.rename("renamed")
    assert engine.session_by_id(session.id) is session
    session.close()
    again = engine.session_by_id(session.id)
    assert (again.name, again.metadata) == ("renamed", {"topic": "x"})
    texts = []
    for owner, session_id in (("you", session.id), ("you", "0" * 32), ("local", "0" * 32)):
        with pytest.raises(NotFound) as refused:
            engine.session_by_id(session_id, owner=owner)
        texts.append(str(refused.value).replace(session_id, "ID"))
    assert len(set(texts)) == 1
    again.delete()
    with pytest.raises(NotFound):
        engine.session_by_id(session.id)


def test_a_session_is_opened_by_its_name_and_not_created(engine):
    session = engine.session("by-name")
    assert engine.session_by_name("by-name") is session
    for name, owner in (("no-name", "local"), ("by-name", "you")):
        with pytest.raises(NotFound):
            engine.session_by_name(name, owner=owner)
    assert "no-name" not in [info.name for info in engine.sessions()]
    with pytest.raises(InvalidRequest, match="name"):
        engine.session_by_name("")


def test_the_revision_rises_with_every_change(engine):
    session = engine.session("revised", owner="r")
    seen = [session.revision]
    for change in (
        lambda: session.send("hello", **GREEDY),
        lambda: session.set_metadata({"a": "b"}),
        lambda: session.set_tags(["t"]),
        lambda: session.rename("revised-too"),
        session.undo,
    ):
        change()
        (info,) = engine.sessions("r")
        assert info.revision == session.revision
        seen.append(session.revision)
    assert seen == sorted(set(seen))
    assert session.metadata == info.metadata == {"a": "b"}
    assert session.fork("copy").metadata == {"a": "b"}


def test_metadata_is_replaced_and_checked(engine):
    session = engine.session("meta", metadata={"a": "1"})
    assert engine.session("meta").metadata == {"a": "1"}
    assert engine.session("meta", metadata={"b": "2"}).metadata == {"b": "2"}
    session.metadata["c"] = "a copy"
    assert session.metadata == {"b": "2"}
    for wrong, expected in (
        ({f"k{n}": "" for n in range(17)}, "metadata is a mapping of 17 keys, expected at most 16"),
        ({"k" * 65: ""}, "expected keys that are strings of 1 to 64 characters"),
        ({"": ""}, "expected keys that are strings of 1 to 64 characters"),
        ({"k": "v" * 513}, "expected a string of at most 512 characters"),
        ({"k": 1}, r"metadata\.k is 1, expected a string"),
        ("text", "metadata is 'text', expected a mapping"),
    ):
        with pytest.raises(InvalidRequest, match=expected):
            session.set_metadata(wrong)
    assert session.metadata == {"b": "2"}
    session.set_metadata({})
    assert session.metadata == {}


def test_lists_come_in_pages(engine):
    for number in range(7):
        engine.session(f"p{number}", owner="p", metadata={"n": str(number)}).set_tags(
            ["even"][number % 2 :]
        )
    names, after = [], None
    while page := engine.sessions("p", limit=3, after=after):
        names += [info.name for info in page]
        after = page[-1].id
    assert names == [info.name for info in engine.sessions("p")]
    assert len(names) == 7
    tagged = engine.sessions("p", tag="even")
    assert engine.sessions("p", tag="even", after=tagged[1].id) == tagged[2:]
    with pytest.raises(InvalidRequest, match="after"):
        engine.sessions("p", after=3)


def test_many_sessions_are_one_request(engine, monkeypatch):
    sessions = [engine.session(f"f{number}", owner="f") for number in range(5)]
    for number, session in enumerate(sessions[:3]):
        session.send("word " * (number + 1), **GREEDY)
    calls = []
    core = engine.core
    monkeypatch.setattr(
        engine,
        "core",
        type(
            "One", (), {"forecasts": lambda _, *given: calls.append(1) or core.forecasts(*given)}
        )(),
    )
    assert engine.residences(sessions) == [session.residence for session in sessions]
    assert engine.predicted_ttfts(sessions, 5) == [s.predicted_ttft(5) for s in sessions]
    assert len(calls) == 2
    found = engine.forecasts(sessions)
    assert [dataclasses.astuple(one.residence)[0] > 0 for one in found] == [True] * 3 + [False] * 2
    assert engine.residences([]) == []
