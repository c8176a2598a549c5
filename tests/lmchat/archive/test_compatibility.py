"""Archives that an earlier lmchat wrote are read as it read them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import compatibility
import pytest

import lmchat
from lmchat.archive import export_session, import_session, read_archive, write_archive
from lmchat.store.sqlite.sqlite_store import SqliteStore

EXPECTED = compatibility.expected()


@pytest.fixture(scope="module", name="model")
def unpacked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compatibility.unpack_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(name="engine")
def opened_engine(model: Path, data_dir: Path) -> Iterator[lmchat.ChatEngine]:
    with lmchat.ChatEngine(model, **compatibility.OPTIONS) as engine:
        yield engine


def session_json(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("session.json")


@pytest.mark.parametrize("name", compatibility.SESSIONS)
def test_round_trip_gives_equal_bytes(name, tmp_path):
    path = compatibility.copy_archive(name, tmp_path)
    archive = read_archive(path)
    again = tmp_path / "again.lmchat"
    assert write_archive(again, archive.record, archive.pages) == len(archive.pages)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", compatibility.SESSIONS)
def test_round_trip_through_a_store_gives_an_equal_document(name, data_dir, tmp_path):
    path = compatibility.copy_archive(name, tmp_path)
    store = SqliteStore(data_dir)
    try:
        record = import_session(store, None, path)
        again = tmp_path / "again.lmchat"
        export_session(store, None, record, again)
    finally:
        store.close()
    assert session_json(again) == session_json(path)


def test_archives_have_pages_as_recorded():
    counts = {name: len(read_archive(compatibility.FOLDER / f"{name}.lmchat").pages)
              for name in compatibility.SESSIONS}  # fmt: skip
    assert (counts["reworded"], counts["side"]) == (0, 0)
    assert min(counts["journey"], counts["trip"]) >= 1


@pytest.mark.cpu_only("pages were recorded on the CPU")
@pytest.mark.parametrize("name", compatibility.SESSIONS)
def test_imported_session_shows_what_was_recorded(engine, name, tmp_path):
    chat = engine.import_(compatibility.copy_archive(name, tmp_path))
    recorded = dict(EXPECTED["sessions"][name], notices=[])
    assert compatibility.session_facts(chat) == recorded


@pytest.mark.cpu_only("pages were recorded on the CPU")
@pytest.mark.parametrize("name", ["journey", "trip"])
def test_imported_pages_serve_the_next_reply(engine, name, tmp_path):
    recorded = EXPECTED["next"][name]
    reply = engine.import_(compatibility.copy_archive(name, tmp_path)).send(
        "And now?", **compatibility.GREEDY
    )
    assert list(reply.token_ids) == recorded["token_ids"]
    assert reply.usage.loaded_tokens == recorded["loaded_tokens"]
    # Kernels have changed since.
    assert reply.usage.foreign_tokens == recorded["loaded_tokens"]
