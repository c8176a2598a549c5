"""Connections that break, servers that are absent, sockets, keys, and clients that are killed."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import command
import pytest
from chat_models import chat_model
from http_server import RunningServer
from serving_process import serving

import lmchat
from lmchat.client import generation
from lmchat.client.http import Connection
from lmchat.errors import InvalidRequest, Unreachable
from lmchat.server import ServerConfig

OPTIONS = {"threads": 1, "isa": "portable"}
LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 400}


class Cutter:
    """A proxy on a loopback port that can cut its connections.

    Args:
        port: the port behind it.
    """

    def __init__(self, port):
        self._to, self._pairs, self._lock = port, [], threading.Lock()
        self._threads = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.accepting = True
        self.quotas = []  # bytes after which the next answers are cut, each once
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                front, _ = self._listening.accept()
            except OSError:
                return
            if not self.accepting:
                front.close()
                continue
            back = socket.create_connection(("127.0.0.1", self._to))
            with self._lock:
                self._pairs.append((front, back))
            for a, b in ((front, back), (back, front)):
                thread = threading.Thread(target=self._copy, args=(a, b, b is front), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _copy(self, source, target, is_answer):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 10):
                target.sendall(data)
                passed += len(data)
                if is_answer and self.quotas and passed > self.quotas[0]:
                    self.quotas.pop(0)
                    self.cuts += 1
                    self._end(source)
        self._end(target)

    @staticmethod
    def _end(one):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Ends all connections."""
        with self._lock:
            for pair in self._pairs:
                for one in pair:
                    self._end(one)

    def close(self):
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for pair in self._pairs:
            for one in pair:
                one.close()


@pytest.fixture(scope="module")
def server():
    with RunningServer(**OPTIONS) as running:
        yield running


@pytest.fixture
def cutter(server):
    found = Cutter(server.port)
    yield found
    found.close()


def test_a_stream_goes_on_after_each_cut(server, cutter):
    with lmchat.connect(server.url) as reference:
        expected = reference.session("whole").send("Tell me a story.", **LONG)
    with lmchat.connect(cutter.url) as engine:
        chat = engine.session("cut")
        cutter.quotas = [2000, 1000, 5000, 1, 3000]
        stream, texts, tokens = chat.stream("Tell me a story.", **LONG), [], []
        for part in stream.events():
            if isinstance(part, lmchat.Delta):
                texts.append(part.text)
                tokens += part.token_ids
        reply = stream.result()
        assert "".join(texts) == reply.text == expected.text
        assert tokens == reply.token_ids == expected.token_ids
        assert cutter.cuts == 5
        assert [turn.text for turn in chat.turns][1] == expected.text
        assert server.engine.sync.session("cut").turns[-1].token_ids == tuple(tokens)


def test_a_reply_that_ended_meanwhile_is_complete(server, cutter):
    with lmchat.connect(cutter.url) as engine:
        chat = engine.session("ended")
        stream = chat.stream("Tell me a story.", **{**LONG, "max_new_tokens": 40})
        first = next(stream)
        cutter.accepting = False
        cutter.cut()
        same = server.engine.sync.session("ended")
        while same.running is not None:
            time.sleep(0.01)
        cutter.accepting = True
        assert "".join([first, *stream]) == same.turns[-1].text == stream.result().text


def test_a_server_that_stays_away_is_named(server, cutter, monkeypatch):
    monkeypatch.setattr(generation, "LINGER", 0.5)
    with lmchat.connect(cutter.url) as engine:
        chat = engine.session("away")
        stream = chat.stream("Tell me a story.", **LONG)
        next(stream)
        cutter.accepting = False
        cutter.cut()
        with pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1"):
            list(stream)
        with pytest.raises(Unreachable):
            chat.send("x")
        server.engine.sync.session("away").stop()


def test_a_killed_client_leaves_no_reply_running(tmp_path):
    model = str(chat_model(tmp_path / "endless", context=200_000))
    with RunningServer(model=model, threads=1) as server:
        _kill_a_client(server)


def _kill_a_client(server):
    code = (
        "import sys, lmchat\n"
        "from lmchat.client import session\n"
        "session.LINGER = 0.3\n"
        f"chat = lmchat.connect({server.url!r}).session('killed')\n"
        "settings = dict(temperature=0, ignore_eos=True, max_new_tokens=100000)\n"
        "stream = chat.stream('Tell me a story.', **settings)\n"
        "next(stream)\n"
        "print('running', flush=True)\n"
        "list(stream)\n"
    )
    environment = command.ENVIRONMENT
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout.readline() == b"running\n"
    process.kill()
    process.communicate()
    chat = server.engine.sync.session("killed")
    chat.follow().result()
    assert chat.turns[-1].finish_reason == "cancelled"


def test_a_reply_of_a_killed_server_is_continued(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCHAT_HOME", str(tmp_path))
    monkeypatch.setitem(command.ENVIRONMENT, "LMCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(generation, "LINGER", 0.2)
    with serving("--threads", "1", "--isa", "portable") as (process, url):
        engine = lmchat.connect(url)
        stream = engine.session("survivor").stream("Tell me a story.", **LONG)
        read = "".join(next(stream) for _ in range(5))
        process.kill()
        with pytest.raises(Unreachable):
            list(stream)
        engine.close()
    with serving("--threads", "1") as (_, url), lmchat.connect(url) as engine:
        chat = engine.session("survivor")
        assert chat.interrupted
        assert chat.turns[-1].text.startswith(read)
        chat.continue_(max_new_tokens=3)
        assert chat.turns[-1].finish_reason == "length"


def test_a_unix_socket(tmp_path):
    path = tmp_path / "s.sock"
    process = subprocess.Popen(
        [*command.LMCHAT, "serve", "--uds", str(path), "--threads", "1"],
        stdout=subprocess.PIPE, text=True, env=command.ENVIRONMENT,
    )  # fmt: skip
    try:
        assert str(path) in process.stdout.readline()
        with lmchat.connect(f"unix:{path}") as engine:
            assert engine.model == "memo"
            assert engine.session().send("Hello!", max_new_tokens=3).finish_reason
    finally:
        process.terminate()
        process.communicate()


def test_a_key_is_needed():
    with RunningServer(ServerConfig(keys={"the-right-key": "ann"}), **OPTIONS) as server:
        for key in (None, "a-wrong-key"):
            with pytest.raises(InvalidRequest, match="the server refused the request"):
                lmchat.connect(server.url, key)
        with lmchat.connect(server.url, "the-right-key") as engine:
            assert engine.owner == "ann"


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1", "ftp://h", "http://", "http://h:x", "unix:s.sock", "http://h/?a=b"]
)
def test_a_malformed_url_is_refused(url):
    with pytest.raises(InvalidRequest, match="url is"):
        lmchat.connect(url)


def test_nothing_listens_or_another_program_does():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def answer():
            with contextlib.suppress(OSError):
                one, _ = taken.accept()
                one.recv(4096)
                one.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                one.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Unreachable, match="is it lmchat serve"):
            lmchat.connect(f"http://127.0.0.1:{port}")
    with pytest.raises(Unreachable, match="no answer"):
        lmchat.connect(f"http://127.0.0.1:{port}")


def test_a_url_of_openai_clients_is_accepted(server):
    with lmchat.connect(f"{server.url}/v1/") as engine:
        assert engine.model == "memo"


def test_the_server_s_modules_are_not_loaded():
    code = (
        "import sys, lmchat; lmchat.connect; "
        "print([m for m in ('fastapi', 'uvicorn', 'lmchat.server') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=command.ENVIRONMENT
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_interrupted_request_leaves_its_late_answer_to_no_other():
    body = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}"

    def answer(text):
        return body.format(len(text), text).encode()

    listening = socket.create_server(("127.0.0.1", 0))
    interrupted, paths = threading.Event(), []

    def serve():
        with contextlib.ExitStack() as stack:
            for number in range(2):
                accepted, _ = listening.accept()
                stack.enter_context(accepted)
                paths.append(accepted.recv(1 << 16).split()[1])
                if number == 0:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    interrupted.wait()
                with contextlib.suppress(OSError):
                    accepted.sendall(answer(f'{{"answer": {number}}}'))

    thread = threading.Thread(target=serve, daemon=True)
    with listening:
        thread.start()
        connection = Connection(f"http://127.0.0.1:{listening.getsockname()[1]}", None)
        with pytest.raises(KeyboardInterrupt):
            connection.call("GET", "/one")
        interrupted.set()
        assert connection.call("GET", "/two") == {"answer": 1}
        assert paths == [b"/one", b"/two"]
        connection.close()
        thread.join()
