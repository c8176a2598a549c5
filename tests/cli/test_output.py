"""Output of a process that serves: what cannot be written is dropped."""

import io
import os
import signal
import socket
import subprocess
import sys

import command
import httpx
import pytest

from lmchat.cli import errors, output


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """A reader that has stalled is not waited for."""
    monkeypatch.setattr(output, "_PATIENCE", 0)


@pytest.fixture
def pipe():
    """A pipe: what reads it, and its writing end as a text file."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as source:
        yield source, io.TextIOWrapper(io.BufferedWriter(output._LossyFile(writer)))
    os.close(writer)


def test_output_arrives(pipe):
    reader, file = pipe
    print("one\ntwo", file=file, flush=True)
    assert reader.read(100) == b"one\ntwo\n"


def test_output_without_a_reader_is_dropped(pipe):
    reader, file = pipe
    reader.close()
    for _ in range(3):
        print("x" * 100_000, file=file, flush=True)
    file.flush()


def test_a_reader_that_stalls_is_not_waited_for_and_reads_on_later(pipe):
    reader, file = pipe
    for n in range(100):
        print(f"{n} " + "x" * 4000, file=file, flush=True)
    os.set_blocking(reader.fileno(), False)
    while reader.read(1 << 20):
        pass
    print("later", file=file, flush=True)
    assert reader.read(100) == b"later\n"


def test_a_full_disk_drops_output():
    with open("/dev/full", "wb") as disk:
        file = io.TextIOWrapper(io.BufferedWriter(output._LossyFile(disk.fileno())))
        print("x" * 10_000, file=file, flush=True)


def test_a_note_that_cannot_be_written_is_dropped(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        errors.note("one")
        errors.note("two")  # and closing the file at the end does not fail either


def test_missing_descriptors_are_opened():
    """Otherwise a file, such as the store, would become number 2, and get messages."""
    code = (
        "import os; from lmchat.cli.errors import open_missing_files as f; f();"
        "found = [os.path.samefile(f'/proc/self/fd/{n}', os.devnull) for n in range(3)];"
        "os.close(0); os._exit(0 if all(found) else 1)"
    )
    script = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", code], env=command.ENVIRONMENT, check=False
    )
    assert done.returncode == 0


def test_a_server_outlives_the_readers_of_its_output(tmp_path):
    """It serves, answers, logs and ends in order."""
    reader, writer = os.pipe()
    os.close(reader)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        process = subprocess.Popen(
            [*command.LMCHAT, "serve", "memo", f"--uds={tmp_path / 's'}"],
            stdout=writer,
            stderr=writer,
            env=command.ENVIRONMENT
            | {"LMCHAT_HOME": str(tmp_path), "NOTIFY_SOCKET": str(tmp_path / "manager")},
        )
        os.close(writer)
        assert manager.recv(100) == b"READY=1"
    transport = httpx.HTTPTransport(uds=str(tmp_path / "s"))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "memo"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_current_folder_that_was_removed_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    named, unnamed = FileNotFoundError(2, "No such file", "x"), FileNotFoundError(2, "No such file")
    assert errors.explained(unnamed) == str(unnamed)
    (tmp_path / "gone").rmdir()
    assert errors.explained(unnamed) == (
        f"the current folder was removed ({unnamed}): start in one that exists"
    )
    assert errors.explained(named) == str(named)
