"""A container whose file systems are read-only but for its data directory."""

import shutil
import tempfile
from pathlib import Path

import command
import httpx
import pytest
from serving.deployment import deployed, needs_haproxy
from serving.read_only import read_only_but

from lmchat.store.sqlite.sqlite_store import SqliteStore

SETTINGS = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture
def home():
    """A data directory that others may reach, with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="lm", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def read_only(monkeypatch, home):
    """All that is started can write in the data directory alone; no variable names a folder."""
    monkeypatch.setattr(command, "LMCHAT", [*read_only_but(home), *command.LMCHAT])
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP", "TMP", "GRADIO_TEMP_DIR", "HOME"):
        monkeypatch.delitem(command.ENVIRONMENT, name, raising=False)
    monkeypatch.setitem(command.ENVIRONMENT, "LMCHAT_HOME", str(home))


@needs_haproxy
def test_a_deployment_with_the_page_serves(read_only, home):
    with deployed(home, "--replicas", "1", "--web") as running, running.client() as client:
        path = client.post("/v1/sessions", json={}).headers["location"]
        turn = client.post(f"{path}/turns", json={"text": "Hi.", "settings": SETTINGS})
        assert turn.status_code == 200, turn.text
        assert "<html" in client.get("/").text
        archive = client.get(f"{path}/export?pages=true")
        assert archive.status_code == 200, archive.text
        made = client.post(
            "/v1/sessions/import?name=again",
            content=archive.content,
            headers={"Content-Type": "application/zip"},
        )
        assert made.status_code == 201, made.text
        assert len(list((home / "tmp").iterdir())) == 2  # the launcher's, and the replica's
    assert list((home / "tmp").iterdir()) == []


def test_a_chat_is_stored_and_exported(read_only, home):
    answered = command.lmchat("chat", "-p", "Hi.", "--session", "mine")
    assert answered.returncode == 0, answered.stderr
    exported = command.lmchat("sessions", "export", "mine", str(home / "mine.zip"))
    assert exported.returncode == 0, exported.stderr
    store = SqliteStore(home)
    assert [one.name for one in store.summaries()] == ["mine"]
    store.close()


def test_a_data_directory_that_cannot_be_written_is_named(read_only, home, tmp_path):
    SqliteStore(tmp_path).close()
    (tmp_path / "pages").mkdir()
    env = command.ENVIRONMENT | {"LMCHAT_HOME": str(tmp_path)}
    refused = command.lmchat("chat", "-p", "Hi.", "--session", "mine", env=env)
    assert refused.returncode == 1
    assert f"{tmp_path} is on a read-only file system" in refused.stderr
    assert "set LMCHAT_HOME to a folder that can be written" in refused.stderr
    refused = command.lmchat("web", "--port", "0", env=env)
    assert refused.returncode == 1
    assert "Set TMPDIR, or LMCHAT_HOME, to a folder that can be written" in refused.stderr
    assert "Traceback" not in refused.stderr


@needs_haproxy
def test_a_deployment_whose_current_folder_was_removed_serves(home, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    started = ["bash", "-c", script, str(tmp_path / "gone"), *command.LMCHAT]
    monkeypatch.setattr(command, "LMCHAT", started)
    with deployed(home, "--replicas", "1") as running:
        assert httpx.get(f"{running.url}/v1/models").status_code == 200
