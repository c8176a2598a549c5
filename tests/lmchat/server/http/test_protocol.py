"""Connections: bounds of time, size and number, and what follows a request."""

import asyncio
import contextlib
import ctypes
import json
import socket
import struct
from contextlib import ExitStack

import http_raw
import pytest
from http_raw import request
from http_server import RunningServer

from lmchat.server import Limits, MountedApp, ServerConfig
from lmchat.server.http.protocol import RESERVE

SO_ATTACH_FILTER = 26
HOST = ("Host", "localhost")
JSON = ("Content-Type", "application/json")
SOON = 0.2
"""Seconds after which a slow client is disconnected."""


async def floods(scope, receive, send):
    """Sends a long stream."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1000):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})


async def sends_much(scope, receive, send):
    """Sends more at once than buffers hold."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * (64 << 20)})


async def waits(scope, receive, send):
    """Answers once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ends_late(scope, receive, send):
    """Sends all of Content-Length, and ends the response once the next request arrives."""
    may_end.clear()
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok", "more_body": True})
    await asyncio.wait_for(may_end.wait(), 60)
    await send({"type": "http.response.body"})


async def begins(scope, receive, send):
    """Begins a response, and ends it once the client has gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await waits(scope, receive, send)


may_end = asyncio.Event()
APPS = (floods, sends_much, waits, ends_late, begins)
MOUNTS = tuple(MountedApp(f"/{one.__name__}", one) for one in APPS)


@pytest.fixture(scope="module")
def server():
    limits = Limits(
        receive_seconds=SOON, send_seconds=SOON, idle_seconds=SOON, head=4096, connections=20
    )
    with RunningServer(ServerConfig(limits=limits), mounts=MOUNTS) as running:
        yield running


def error_of(data: bytes) -> dict:
    head, _, body = data.partition(b"\r\n\r\n")
    return {"status": http_raw.parse_head(head).status, **json.loads(body)["error"]}


def everything(port, data):
    """Returns what a server sends to these bytes until it closes the connection."""
    with http_raw.connected(port) as connection:
        connection.sendall(data)
        return http_raw.rest(connection)


def open_requests(server):
    return server.app.state.in_flight


async def until_none(server):
    while open_requests(server) or server.uvicorn.server_state.connections:
        await asyncio.sleep(0.01)


def test_a_slow_head_is_refused(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(b"GET /health HT")
        assert error_of(http_raw.rest(connection))["status"] == 408


def test_a_slow_head_after_a_request_is_refused(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/health"))
        assert http_raw.answer(connection).status == 200
        connection.sendall(b"GET /health HT")
        assert error_of(http_raw.rest(connection))["status"] == 408


@pytest.mark.parametrize(
    "headers", [("Content-Length", "100"), ("Transfer-Encoding", "chunked")], ids=str
)
def test_a_slow_body_is_refused(server, headers):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("POST", "/v1/conversations", [HOST, JSON, headers]))
        assert error_of(http_raw.rest(connection))["status"] == 408


def test_the_rest_of_a_refused_body_does_not_keep_a_connection(server, monkeypatch):
    monkeypatch.setattr("lmchat.server.http.protocol.LINGER_SECONDS", SOON)
    with http_raw.connected(server.port) as connection:
        headers = [HOST, ("Content-Length", "100")]
        connection.sendall(request("POST", "/v1/conversations", headers) + b"x")
        assert http_raw.answer(connection).status == 415
        assert http_raw.rest(connection) == b""


def test_an_idle_connection_is_closed(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/health"))
        assert http_raw.answer(connection).status == 200
        assert http_raw.rest(connection) == b""


@pytest.mark.parametrize("size", [5000, 300_000])
def test_a_large_head_is_refused(server, size):
    data = request("GET", "/health", [HOST, ("X-Long", "x" * size)])
    with http_raw.connected(server.port) as connection:
        connection.sendall(data)
        assert error_of(http_raw.rest(connection))["status"] == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff" * 100,
        b"GET / HTTP/x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
        request("POST", "/v1/conversations", [HOST, JSON, ("Transfer-Encoding", "chunked")])
        + b"zz\r\n",
        request("POST", "/v1/conversations", [HOST, JSON, ("Transfer-Encoding", "chunked")])
        + b"f" * 30 + b"\r\n",
        request("POST", "/v1/conversations", [HOST, JSON, ("Content-Length", "-1")]),
        b"\r\n\r\n" + request("GET", "/health"),
        b"\n" + request("GET", "/health"),
    ],
)  # fmt: skip
def test_garbage_is_refused(server, data):
    with http_raw.connected(server.port) as connection:
        connection.sendall(data)
        assert error_of(http_raw.rest(connection))["status"] == 400


LENGTHS = [("Content-Length", "5"), ("Transfer-Encoding", "chunked")]


@pytest.mark.parametrize("headers", [LENGTHS, LENGTHS[::-1]], ids=str)
def test_what_follows_a_body_with_two_ends_is_not_read(server, headers):
    data = request("POST", "/v1/conversations", [HOST, JSON, *headers]) + b"0\r\n\r\n"
    with http_raw.connected(server.port) as connection:
        connection.sendall(data + request("GET", "/health"))
        sent = http_raw.rest(connection)
    assert error_of(sent)["status"] == 400
    assert sent.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("parts", [[b"\r\n"], [b"\r", b"\n"]], ids=str)
def test_an_empty_line_before_a_request_is_skipped(server, parts):
    with http_raw.connected(server.port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for part in (*parts, request("GET", "/health")):
                connection.sendall(part)
            assert http_raw.answer(connection).status == 200
        last = request("GET", "/health", [HOST, ("Connection", "close")])
        connection.sendall(b"\r\n" + request("GET", "/health") + b"\r\n" + last)
        assert http_raw.rest(connection).count(b"HTTP/1.1 200 ") == 2


OTHER_PROTOCOLS = [
    ("TLS", bytes.fromhex("16030100c8010000c40303") + b"\x7f" * 32),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
    ("the PROXY protocol", b"PROXY TCP4 192.0.2.1 192.0.2.2 4242 80\r\n"),
    ("the PROXY protocol", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12)),
]


@pytest.mark.parametrize(("name", "data"), OTHER_PROTOCOLS)
def test_other_protocols_are_named(server, caplog, name, data):
    with caplog.at_level("INFO", "lmchat.server"), http_raw.connected(server.port) as connection:
        connection.sendall(data)
        error = error_of(http_raw.rest(connection))
    assert (error["status"], name in error["message"]) == (400, True)
    assert [name in line for line in caplog.messages if "127.0.0.1: " in line] == [True]


def test_another_version_of_http_is_refused(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(b"GET /health HTTP/3.0\r\nHost: localhost\r\n\r\n")
        assert error_of(http_raw.rest(connection))["status"] == 505


def test_a_client_that_does_not_read_a_stream_is_disconnected(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/floods/"))
        server.call(until_none(server))


def test_a_client_that_does_not_read_a_large_response_is_disconnected(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/sends_much/"))
        server.call(until_none(server))


def test_a_slow_reader_gets_everything(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/sends_much/", version="1.0"))
        assert len(http_raw.rest(connection).partition(b"\r\n\r\n")[2]) == 64 << 20


@pytest.mark.parametrize("early", [b"", b"GET /health HT", request("GET", "/health")])
def test_a_disconnect_is_seen_whatever_was_sent_early(server, early):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/waits/") + early)
        server.call(until_running(server))
        connection.sendall(early)
    server.call(until_none(server))


async def until_running(server):
    while not open_requests(server):
        await asyncio.sleep(0.01)


def test_a_reset_is_a_disconnect(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/waits/"))
        server.call(until_running(server))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.call(until_none(server))


def test_a_client_that_vanished_is_a_disconnect(server):
    server.call(until_none(server))
    with http_raw.connected(server.port) as connection:
        vanish(connection)
        with contextlib.suppress(TimeoutError):
            connection.sendall(request("GET", "/begins/"))
        server.call(until_one(server))
        server.call(until_none(server))


def vanish(connection):
    """Makes the system drop all packets for a connection, as if its machine were gone."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(code))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


async def until_one(server):
    while not server.uvicorn.server_state.tasks:
        await asyncio.sleep(0.001)


def test_a_silent_client_is_asked_whether_it_is_there(patient):
    patient.call(until_none(patient))
    with http_raw.connected(patient.port):
        patient.call(until_open(patient, 1))
        (one,) = patient.uvicorn.server_state.connections
        connection = one.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        options = [getattr(socket, name) for name in names]
        assert [connection.getsockopt(socket.IPPROTO_TCP, one) for one in options] == [
            10, 5, 3, 25_000
        ]  # fmt: skip


def test_much_sent_early_drops_the_connection(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/waits/"))
        server.call(until_running(server))
        connection.sendall(b"x" * 8192)
        assert http_raw.rest(connection) == b""
    server.call(until_none(server))


async def until_paused_or_closed(server):
    connections = server.uvicorn.server_state.connections
    while connections and not any(one.flow.read_paused for one in connections):
        await asyncio.sleep(0.01)
    may_end.set()


def test_a_request_after_a_whole_response_that_the_app_has_not_ended(server):
    server.call(until_none(server))
    with http_raw.connected(server.port) as connection:
        connection.sendall(request("GET", "/ends_late/"))
        assert http_raw.answer(connection).body == b"ok"
        headers = [HOST, ("Content-Type", "text/plain")]
        connection.sendall(request("POST", "/v1/conversations", headers, b"x" * 8192))
        server.call(until_paused_or_closed(server))
        assert http_raw.answer(connection).status == 415


def test_requests_sent_early_are_answered_in_order(server):
    paths = ["/health", "/version", "/ready", "/nothing"] * 3
    with http_raw.connected(server.port) as connection:
        connection.sendall(b"".join(request("GET", path) for path in paths))
        found = read_all(connection, len(paths))
    assert found == [200, 200, 200, 404] * 3


def read_all(connection, count):
    """Returns the statuses of responses that may arrive in any pieces."""
    data, found = b"", []
    while len(found) < count:
        head, end, rest = data.partition(b"\r\n\r\n")
        if end:
            parsed = http_raw.parse_head(head)
            length = int(parsed.headers["content-length"])
            if len(rest) >= length:
                found.append(parsed.status)
                data = rest[length:]
                continue
        more = connection.recv(65536)
        assert more, found
        data += more
    return found


MOST = 20
"""The limit of connections of `patient`."""


@pytest.fixture(scope="module")
def patient():
    """A server that waits for slow clients."""
    with RunningServer(ServerConfig(limits=Limits(connections=MOST), root_path="/at")) as running:
        yield running


@pytest.fixture
def occupied(patient):
    """Connections on each of which half a head has arrived."""
    patient.call(until_none(patient))
    with ExitStack() as stack:
        found = [stack.enter_context(http_raw.connected(patient.port)) for _ in range(MOST)]
        for connection in found:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        patient.call(until_read(patient, MOST))
        yield found


async def until_read(server, count):
    connections = server.uvicorn.server_state.connections
    while sum(bool(one.conn.trailing_data[0]) for one in connections) < count:
        await asyncio.sleep(0.01)


def test_too_many_connections_are_refused(patient, occupied):
    data = request("GET", "/v1/models")
    assert error_of(everything(patient.port, data))["status"] == 503
    for connection in occupied[1:]:
        connection.sendall(b"Host: localhost\r\n\r\n")
        assert http_raw.answer(connection).status == 200
    assert http_raw.exchange(patient.port, data).status == 200
    occupied[0].sendall(b"Host: localhost\r\n\r\n")  # one whose request had begun was not closed
    assert http_raw.answer(occupied[0]).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/at/health", "/ready?x"])
def test_probes_are_answered_at_the_limit_of_connections(patient, occupied, path):
    data = request("GET", path) + request("GET", path)
    assert everything(patient.port, data).count(b"HTTP/1.1 200") == 1
    data = request("POST", path, [HOST, JSON, ("Content-Length", "100")])
    assert error_of(everything(patient.port, data))["status"] == 503


def test_far_too_many_connections_are_refused_at_once(patient, occupied):
    with ExitStack() as stack:
        for _ in range(RESERVE):
            connection = stack.enter_context(http_raw.connected(patient.port))
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        patient.call(until_read(patient, MOST + RESERVE))
        assert error_of(everything(patient.port, b""))["status"] == 503


@pytest.mark.parametrize("is_used", [True, False])
def test_the_connection_without_a_request_for_longest_makes_room(patient, is_used):
    patient.call(until_none(patient))
    with ExitStack() as stack:
        held = []
        for _ in range(MOST):
            held.append(stack.enter_context(http_raw.connected(patient.port)))
            if is_used:
                held[-1].sendall(request("GET", "/v1/models"))
                assert http_raw.answer(held[-1]).status == 200
        if not is_used:
            patient.call(until_open(patient, MOST))
        assert http_raw.exchange(patient.port, request("GET", "/v1/models")).status == 200
        assert http_raw.rest(held[0]) == b""
        held[1].sendall(request("GET", "/health"))
        assert http_raw.answer(held[1]).status == 200


async def until_open(server, count):
    while len(server.uvicorn.server_state.connections) < count:
        await asyncio.sleep(0.01)
