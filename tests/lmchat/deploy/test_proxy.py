"""HAProxy's configuration, in front of stub replicas on Unix sockets."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import threading

import httpx
import pytest
from deployment import needs_haproxy

from lmchat.deploy import proxy
from lmchat.errors import InvalidRequest
from lmchat.server.config import Limits, ServerConfig
from lmchat.webui.paths import APP, FILES

ID = "0123456789abcdef0123456789abcdef"
PATTERN = f"{APP}|{FILES}"


class Stub:
    """A replica that answers every request with its number, or ends at the first one."""

    def __init__(self, path, number):
        self.number, self.is_dying, self.is_streaming, self.received = number, False, False, 0
        self.paths = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._socket.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(1 << 16)
                is_check = request.startswith(b"GET /ready")
                self.received += not is_check
                if not is_check:
                    self.paths.append(request.split()[1].decode())
                if b"GET /gradio_api/queue/data" in request and self.is_streaming:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n:")
                    connection.recv(1)  # until HAProxy closes it
                    continue
                if self.is_dying and not is_check:
                    self._socket.shutdown(socket.SHUT_RDWR)
                    continue
                body = b"%d" % self.number
                head = b'HTTP/1.1 200 OK\r\nConnection: close\r\nETag: "1"\r\n'
                with contextlib.suppress(OSError):
                    connection.sendall(head + b"Content-Length: 1\r\n\r\n" + body)


@pytest.fixture
def stubs(tmp_path):
    """Three stub replicas, and a client of HAProxy in front of them."""
    with behind_haproxy(tmp_path, ServerConfig()) as found:
        yield found


@contextlib.contextmanager
def behind_haproxy(folder, config):
    """Yields three stub replicas, and a client of HAProxy in front of them."""
    with contextlib.ExitStack() as stack:
        stubs = [Stub(proxy.socket_of(folder, n), n) for n in (1, 2, 3)]
        for stub in stubs:
            stack.callback(stub.close)
        bound = stack.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        file = folder / "cfg"
        address, port = f"fd@{bound.fileno()}", bound.getsockname()[1]
        file.write_text(proxy.configuration(folder, 3, address, port, config, PATTERN))
        process = subprocess.Popen(
            [proxy.program(), "-db", "-f", str(file)],
            pass_fds=[bound.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(process.communicate)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        while process.poll() is None:
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(url)
                break
        yield stubs, stack.enter_context(httpx.Client(base_url=url, timeout=60))


def resume(folder, number):
    """Resumes a replica, and returns once it gets requests."""

    async def resumed():
        await proxy.resume(proxy.admin_of(folder), number)
        await proxy.wait_until_up(proxy.admin_of(folder), number)

    asyncio.run(resumed())


@needs_haproxy
def test_a_session_has_one_replica_whatever_names_it(stubs):
    _, client = stubs
    used = set()
    for n in range(30):
        name = f"{n:032x}"
        answers = [
            client.get(path).text
            for path in (
                f"/v1/sessions/{name}",
                f"/v1/sessions/{name}/turns?x=1",
                f"/v1/conversations/conv_{name}",
                f"/v1/responses/resp_{name}0123abcd",
            )
        ]
        answers.append(client.get("/v1/models", headers={"x-session-id": name}).text)
        assert len(set(answers)) == 1, answers
        used.add(answers[0])
    assert used == {"1", "2", "3"}


@needs_haproxy
def test_sessions_of_a_replica_that_ended_move_and_others_stay(stubs):
    (one, *_), client = stubs
    names = [f"{n:032x}" for n in range(60)]
    before = {name: client.get(f"/v1/sessions/{name}").text for name in names}
    one.close()
    after = {name: client.post(f"/v1/sessions/{name}").text for name in names}
    assert {after[name] for name in names if before[name] == "1"} == {"2", "3"}
    assert all(after[name] == before[name] for name in names if before[name] != "1")


@needs_haproxy
def test_a_draining_replica_gets_nothing_and_others_keep_their_sessions(stubs, tmp_path):
    (one, *_), client = stubs
    names = [f"{n:032x}" for n in range(60)]
    before = {name: client.get(f"/v1/sessions/{name}").text for name in names}
    asyncio.run(proxy.drain(proxy.admin_of(tmp_path), 1))
    received = one.received
    during = {name: client.get(f"/v1/sessions/{name}").text for name in names}
    assert {client.get("/v1/models").text for _ in range(6)} == {"2", "3"}
    assert one.received == received
    assert all(during[name] == before[name] for name in names if before[name] != "1")

    resume(tmp_path, 1)
    assert {name: client.get(f"/v1/sessions/{name}").text for name in names} == before


@needs_haproxy
@pytest.mark.parametrize("method", ["GET", "POST", "POST with a key"])
def test_a_request_is_sent_again_only_if_that_changes_nothing(stubs, method):
    replicas, client = stubs
    home = replicas[int(client.get(f"/v1/sessions/{ID}").text) - 1]
    home.is_dying = True
    headers = {"Idempotency-Key": "k"} if "key" in method else {}
    # On a connection that had requests before, HAProxy closes it instead of answering 502.
    url = client.base_url.join(f"/v1/sessions/{ID}")
    body = None if method == "GET" else {"text": "Hello."}
    answer = httpx.request(method.split()[0], url, headers=headers, json=body, timeout=60)
    assert home.received == 2
    if method == "POST":
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "replica_ended"
    else:
        assert answer.status_code == 200
        assert answer.text != str(home.number)


PAGE = ("/", "/?session=1", "/login", "/gradio_api/queue/data?session_hash=1", "/assets/a.js")


def replica_of(client):
    """Returns the replica that the cookie of the page names."""
    (name,) = client.cookies
    assert name == f"lmchat_replica_{client.base_url.port}"
    return client.cookies[name].removeprefix("r")


@needs_haproxy
def test_a_browser_stays_with_the_replica_of_its_first_page(stubs):
    _, client = stubs
    used = set()
    for _ in range(6):
        client.cookies.clear()
        first = client.get("/")
        (cookie,) = first.headers.get_list("set-cookie")
        assert cookie.split("; ")[1:] == ["path=/", "HttpOnly", "SameSite=Lax"]
        assert first.headers["cache-control"] == "private"
        answers = [client.get(path) for path in PAGE * 3]
        assert {answer.text for answer in answers} == {first.text} == {replica_of(client)}
        assert not any("set-cookie" in answer.headers for answer in answers)
        used.add(first.text)
    assert used == {"1", "2", "3"}


@needs_haproxy
def test_the_api_has_no_cookie(stubs):
    _, client = stubs
    client.get("/")
    here = replica_of(client)
    names = [f"/v1/sessions/{n:032x}" for n in range(20)]
    asked = [*names, "/v1/models", "/v1/sessions/import", "/metrics", "/pages", "/login/x", "//"]
    answers = [client.get(path) for path in asked]
    assert {answer.text for answer in answers[:20]} > {here}
    assert not any("set-cookie" in answer.headers for answer in answers)
    assert client.get("/", headers={"x-session-id": names[0]}).text == here
    client.cookies.clear()
    assert [client.get(path).text for path in names] == [answer.text for answer in answers[:20]]


@needs_haproxy
def test_a_browser_moves_when_its_replica_has_ended(stubs):
    replicas, client = stubs
    home = replicas[int(client.get("/").text) - 1]
    home.close()
    answer = client.post("/gradio_api/queue/join")
    assert answer.status_code == 200
    assert answer.text != str(home.number)
    assert replica_of(client) == answer.text
    assert client.get("/gradio_api/queue/data").text == answer.text


@needs_haproxy
def test_a_browser_moves_when_its_replica_drains_and_its_stream_ends(stubs, tmp_path):
    """Otherwise its tab would wait at the one replica for what it has asked of the other one."""
    replicas, client = stubs
    home = int(client.get("/").text)
    replicas[home - 1].is_streaming = True
    with client.stream("GET", "/gradio_api/queue/data") as stream:
        parts = stream.iter_raw()
        assert next(parts) == b":"
        asyncio.run(proxy.drain(proxy.admin_of(tmp_path), home))
        assert list(parts) == []
    moved = client.get("/").text
    assert moved != str(home)
    assert replica_of(client) == moved
    replicas[home - 1].is_streaming = False
    resume(tmp_path, home)
    assert {httpx.get(client.base_url).text for _ in range(6)} == {"1", "2", "3"}
    assert client.get("/").text == moved


@needs_haproxy
def test_without_a_replica_the_answer_is_an_error_object(stubs):
    replicas, client = stubs
    for replica in replicas:
        replica.close()
    for path in ("/v1/models", f"/v1/sessions/{ID}"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"


@needs_haproxy
def test_each_replica_has_its_metrics_also_while_it_drains(stubs, tmp_path):
    replicas, client = stubs
    asyncio.run(proxy.drain(proxy.admin_of(tmp_path), 2))
    answers = [client.get(f"/replicas/{n}/metrics").text for n in (1, 2, 3)]
    assert answers == ["1", "2", "3"]
    assert [replica.paths[-1] for replica in replicas] == ["/metrics"] * 3
    replicas[0].close()
    assert client.get("/replicas/1/metrics").status_code == 503
    assert client.get("/replicas/4/metrics").text in "23"
    assert "/replicas/4/metrics" in replicas[1].paths + replicas[2].paths  # there it is not found


@needs_haproxy
def test_clients_without_a_request_leave_room_for_others(tmp_path):
    config = ServerConfig(limits=Limits(connections=2))
    with behind_haproxy(tmp_path, config) as (stubs, client), contextlib.ExitStack() as stack:
        address = ("127.0.0.1", client.base_url.port)
        for _ in range(4 * len(stubs)):  # twice as many as replicas accept, and more than are kept
            connection = stack.enter_context(socket.create_connection(address, 60))
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = connection.recv(1 << 16).lower()
            assert head.startswith(b"http/1.1 200")
        assert b"\r\nconnection: close" in head
        assert client.get("/health").status_code == 200


@needs_haproxy
def test_the_exporter_of_haproxy_is_there(stubs):
    _, client = stubs
    client.get(f"/v1/sessions/{ID}")
    text = client.get("/proxy/metrics").text
    assert 'haproxy_server_http_responses_total{proxy="keyed",server="r1",code="2xx"}' in text


@needs_haproxy
def test_the_longest_head_that_the_server_accepts_passes(stubs):
    _, client = stubs
    answer = client.get("/v1/models", headers={"x-long": "a" * ((16 << 10) - 300)})
    assert answer.status_code == 200


def test_haproxy_is_ready_while_it_answers(tmp_path, monkeypatch):
    """One that has stopped still has connections accepted for it."""
    monkeypatch.setattr(proxy, "_ANSWER_SECONDS", 0.0)
    admin = proxy.admin_of(tmp_path)
    assert asyncio.run(proxy.check(admin)) == ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(admin)
        assert asyncio.run(proxy.check(admin)) == ""
        listener.listen()
        assert asyncio.run(proxy.check(admin)) == ""

        async def answering():
            async def answer(reader, writer):
                assert await reader.readline() == b"show info\n"
                writer.write(b"Name: HAProxy\n")
                writer.close()

            monkeypatch.setattr(proxy, "_ANSWER_SECONDS", 60.0)
            async with await asyncio.start_unix_server(answer, sock=listener.dup()):
                return await proxy.check(admin)

        assert asyncio.run(answering()) == "ready"


def program(path, version):
    file = path / "haproxy"
    file.write_text(f"#!/bin/sh\necho 'HAProxy version {version}-1 2022/01/01'\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("version", ["2.5.9", "1.8.0"])
def test_an_old_haproxy_is_refused(tmp_path, monkeypatch, version):
    monkeypatch.setattr(proxy, "_programs", lambda: iter([program(tmp_path, version)]))
    with pytest.raises(InvalidRequest, match=re.escape(f"version {version}")):
        proxy.program()


def test_a_newer_one_beside_an_old_one_is_taken(tmp_path, monkeypatch):
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    found = [program(folders[0], "2.4.1"), program(folders[1], "3.0.2")]
    monkeypatch.setattr(proxy, "_programs", lambda: iter(found))
    assert proxy.program() == found[1]


def test_a_missing_haproxy_is_refused(monkeypatch):
    monkeypatch.setattr(proxy, "_programs", lambda: iter(()))
    with pytest.raises(InvalidRequest, match="there is no HAProxy, expected HAProxy 2.6 or newer"):
        proxy.program()


def test_error_objects_have_all_fields():
    for line in map(proxy._error, *zip(*proxy._ERRORS, strict=True)):
        body = line.partition("string '")[2].rstrip("'")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@needs_haproxy
@pytest.mark.parametrize("allowed", [["app://notes.example", "http://[::1]:80"], ["*"]])
def test_answers_of_haproxy_can_be_read_by_allowed_origins(tmp_path, allowed):
    config = ServerConfig(keys={"secret-a": "ann"}, allow_origins=allowed)
    with behind_haproxy(tmp_path, config) as (stubs, client):
        for stub in stubs:
            stub.is_dying = True
        for origin in ("app://notes.example", "https://evil.example", None):
            for path in ("/v1/models", "/login"):
                headers = {} if origin is None else {"Origin": origin}
                answer = client.post(path, headers=headers)
                assert answer.status_code >= 500
                is_allowed = path != "/login" and (origin in allowed or (origin and "*" in allowed))
                expected = origin if is_allowed else None
                assert answer.headers.get("access-control-allow-origin") == expected


@needs_haproxy
def test_below_a_path_requests_have_it_or_not(tmp_path):
    with behind_haproxy(tmp_path, ServerConfig(root_path="/ai/chat.x")) as (stubs, client):
        for n in range(9):
            path = f"/v1/sessions/{n:032x}"
            prefixes = ("", "/ai/chat.x")
            assert len({client.get(prefix + path).text for prefix in prefixes}) == 1
        assert client.get("/ai/chat.x/proxy/metrics").text in {"1", "2", "3"}
        assert "haproxy_" in client.get("/proxy/metrics").text
        cookies = client.get("/ai/chat.x/").headers["set-cookie"]
        assert "lmchat_replica_" in cookies
        for path in ("/ai/chat.x", "/ai/chatxx/y"):
            client.get(path)
        seen = {path for stub in stubs for path in stub.paths}
        assert seen >= {"/", "/ai/chat.x", "/ai/chatxx/y", "/proxy/metrics"}
        assert not any(path.startswith("/ai/chat.x/") for path in seen)
