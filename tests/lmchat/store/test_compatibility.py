"""Data directories that an earlier lmchat wrote (schema version 4) are read as it read them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import compatibility
import pytest

import lmchat
from lmchat.store.sqlite.sqlite_store import SqliteStore

pytestmark = pytest.mark.cpu_only("pages were recorded on the CPU")
EXPECTED = compatibility.expected()


@pytest.fixture(scope="module", name="model")
def unpacked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compatibility.unpack_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(name="data")
def unpacked_data(tmp_path: Path) -> Path:
    return compatibility.unpack_data(tmp_path / "data")


@pytest.fixture(name="engine")
def opened_engine(model: Path, data: Path) -> Iterator[lmchat.ChatEngine]:
    with lmchat.ChatEngine(model, store=data, **compatibility.OPTIONS) as engine:
        yield engine


def test_recorded_store_has_schema_version_4(data):
    with contextlib.closing(sqlite3.connect(data / "sessions.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (4,)


@pytest.mark.parametrize("name", compatibility.SESSIONS)
def test_transcript_and_settings_are_read_as_recorded(engine, name):
    assert compatibility.session_facts(engine.session(name)) == EXPECTED["sessions"][name]


def test_search_finds_what_it_found(engine):
    for word, names in EXPECTED["searches"].items():
        assert sorted(info.name for info in engine.sessions(search=word)) == names, word
    assert {info.name for info in engine.sessions()} == set(compatibility.SESSIONS)
    tagged = {info.name for info in engine.sessions(tag="日本")}
    assert tagged == {"journey", "side"}


@pytest.mark.parametrize("name", compatibility.SESSIONS)
def test_next_reply_loads_the_recorded_pages_and_has_the_recorded_tokens(engine, name):
    reply = engine.session(name).send("And now?", **compatibility.GREEDY)
    found = compatibility.reply_facts(reply)
    notices = found.pop("notices")
    recorded = {fact: value for fact, value in EXPECTED["next"][name].items() if fact != "notices"}
    # Kernels have changed since, and the reply says so.
    assert found == recorded | {"foreign_tokens": recorded["loaded_tokens"]}
    assert [f"KV of {recorded['loaded_tokens']} tokens was computed by another kind" in n
            for n in notices] == [True]  # fmt: skip


def test_some_recorded_session_has_pages_on_disk():
    assert max(facts["loaded_tokens"] for facts in EXPECTED["next"].values()) > 64


def test_recorded_store_has_no_damage(data):
    store = SqliteStore(data)
    try:
        assert store.verify() == []
    finally:
        store.close()


@pytest.mark.parametrize("name", ["journey", "reworded", "side"])
def test_export_of_a_recorded_session_is_the_recorded_archive(engine, name, tmp_path):
    path = tmp_path / "again.lmchat"
    engine.session(name).export(path, pages=name == "journey")
    recorded = compatibility.FOLDER / f"{name}.lmchat"
    assert path.read_bytes() == recorded.read_bytes()
