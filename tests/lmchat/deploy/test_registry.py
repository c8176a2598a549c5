"""The launcher's hold on a data directory, and commands to a launcher that is slow or silent."""

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import command
import pytest

from lmchat.deploy import registry
from lmchat.errors import Error, InvalidRequest, StoreError
from lmchat.store.temporary import remove_leftovers


@pytest.fixture(autouse=True)
def short_answers(monkeypatch, data_dir):
    """A launcher that says nothing is waited for as shortly as possible."""
    monkeypatch.setattr(registry, "ANSWER_SECONDS", 0.001)
    return data_dir


def is_cleanable(folder):
    """Returns whether a cleaner that respects locks, as systemd-tmpfiles, would touch a folder."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_the_folder_is_that_of_the_login_and_is_locked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, "/nowhere")
    with registry.claimed() as claim:
        assert claim.folder.parent == tmp_path
        assert claim.folder.stat().st_mode & 0o777 == 0o700
        assert not is_cleanable(claim.folder)


@pytest.mark.parametrize("login", ["", "relative", "/nowhere"])
def test_without_a_folder_of_the_login_there_is_another(tmp_path, monkeypatch, login):
    monkeypatch.setenv("XDG_RUNTIME_DIR", login)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with registry.claimed() as claim:
        assert claim.folder.parent == tmp_path


@pytest.fixture
def read_only(monkeypatch):
    """No folder but the data directory can be written."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(registry, "system_folders", lambda: [Path("/nowhere")])


def test_where_no_other_folder_can_be_written_it_is_in_the_data_directory(data_dir, read_only):
    with registry.claimed() as claim:
        assert claim.folder.parent == data_dir / "tmp"
        assert claim.folder.stat().st_mode & 0o777 == 0o700
        remove_leftovers(data_dir)
        assert not is_cleanable(claim.folder)
        shutil.rmtree(data_dir / "tmp")
        claim.restore()
        assert not is_cleanable(claim.folder)
    assert list((data_dir / "tmp").iterdir()) == []


def test_a_data_directory_with_a_long_path_is_refused_in_words(data_dir, read_only, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", str(data_dir / ("x" * 80)))
    needed = pytest.raises(InvalidRequest, match=r"at most \d+ bytes; set XDG_RUNTIME_DIR to such")
    with needed, registry.claimed():
        pass


def test_a_folder_that_takes_no_sockets_is_passed_over(data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    connect = registry.socket.socket

    class Refusing(connect):
        def bind(self, path):
            if path.startswith(str(tmp_path)):
                raise PermissionError
            super().bind(path)

    monkeypatch.setattr(registry.socket, "socket", Refusing)
    with registry.claimed() as claim:
        assert claim.folder.parent != tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_data_directory_that_cannot_be_written_is_named(data_dir):
    (data_dir / "deployment").mkdir()
    with pytest.raises(StoreError, match="set LMCHAT_HOME to another folder"), registry.claimed():
        pass


def test_what_cleaners_remove_is_made_again(data_dir):
    with registry.claimed() as claim:
        record = (data_dir / "deployment").read_text()
        shutil.rmtree(claim.folder)
        (data_dir / "deployment").unlink()
        claim.restore()
        assert not is_cleanable(claim.folder)
        assert (data_dir / "deployment").read_text() == record
        with pytest.raises(InvalidRequest, match="a deployment runs on"), registry.claimed():
            pass
        before = claim.folder.stat()
        claim.restore()
        assert os.path.samestat(claim.folder.stat(), before)


def test_a_folder_of_another_kind_is_not_taken_over():
    with registry.claimed() as claim:
        claim.folder.rmdir()
        claim.folder.mkdir()
        claim.folder.chmod(0o755)
        with pytest.raises(InvalidRequest, match="expected a private folder"):
            claim.restore()
        claim.folder.chmod(0o700)
        claim.restore()


def test_a_data_directory_that_another_launcher_has_is_not_taken_back(data_dir):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(registry.claimed())
        (data_dir / "deployment").unlink()
        stack.enter_context(registry.claimed())
        with pytest.raises(InvalidRequest, match="a deployment runs on"):
            first.restore()


def test_the_locks_of_a_launcher_that_was_killed_keep_no_other_from_starting(data_dir):
    """Also while its replicas still run."""
    code = (
        "import subprocess; from lmchat.deploy import registry as r\n"
        "with r.claimed() as c: print(c.folder, flush=True); subprocess.run(['cat'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=command.ENVIRONMENT | {"LMCHAT_HOME": str(data_dir)},
    ) as process:
        folder = Path(process.stdout.readline().strip())
        assert not is_cleanable(folder)
        process.kill()
        process.wait()
        with registry.claimed() as claim:  # cat still waits for the end of its input
            assert claim.folder != folder
            assert not folder.exists()


@contextlib.contextmanager
def silent_launcher():
    """A launcher that is stopped: it holds its locks, and the system accepts connections for it."""
    with registry.claimed() as claim, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{claim.folder}/{registry.CONTROL}")
        listener.listen()
        yield listener


@pytest.mark.parametrize(
    "ask", [registry.status, lambda: list(registry.restart(1)), lambda: list(registry.stop(True))]
)
def test_a_launcher_that_does_not_answer_is_named(ask):
    with silent_launcher(), pytest.raises(Error, match=f"process {os.getpid()}, does not answer"):
        ask()
    with registry.claimed(), pytest.raises(Error, match="it starts, hangs or is stopped"):
        ask()  # it has no socket yet


def test_a_launcher_that_answers_other_questions_is_waited_for(monkeypatch):
    """What is known is shown meanwhile, once."""
    states = iter([["ready", "ready"]] + [["starting", "ready"]] * 3 + [["starting", "silent"]] * 2)
    ended = threading.Event()

    def status():
        if (found := next(states, None)) is None:
            ended.set()
            found = ["ready", "ready"]
        return {"replicas": [{"replica": n, "state": s} for n, s in enumerate(found, start=1)]}

    def serve():
        connection, _ = listener.accept()
        with connection:
            ended.wait()
            connection.sendall(b'{"step": "replica 1: ready"}\n{"error": null}')

    monkeypatch.setattr(registry, "status", status)
    with silent_launcher() as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        steps = list(registry.restart(1))
        thread.join()
    assert steps == [
        "waiting: replica 1 is starting",
        "waiting: replica 1 is starting, replica 2 is silent",
        "replica 1: ready",
    ]
