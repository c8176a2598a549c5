"""The HTTP client: responses however they are framed and cut, kept connections, failures."""

import asyncio

import pytest
from scripted_server import Script, ScriptedServer, stream

from lmchat.cli.bench.serving.http_client import (
    Connection,
    ConnectionLost,
    HttpClient,
    InvalidResponse,
    parsed_url,
)
from turbomind.errors import InvalidRequest


class Transport(asyncio.Transport):
    def write(self, data):
        pass

    def abort(self):
        pass


def received(data, step, closes=False, stream=None):
    """Returns the response of a connection that receives `data` in parts of `step` bytes."""

    async def main():
        connection = Connection()
        connection.connection_made(Transport())
        sink = None if stream is None else lambda part, at: stream.append(part)
        response = connection.send(b"", sink)
        for begin in range(0, len(data), step):
            connection.data_received(data[begin : begin + step])
        if closes:
            connection.connection_lost(None)
        return await asyncio.wait_for(response, 5)

    return asyncio.run(main())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
FRAMES = {
    "length": (HEAD + b'Content-Length: 7\r\n\r\n{"a":1}', False),
    "chunks": (
        HEAD + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;x=y\r\n":1}\r\n0\r\nT: x\r\n\r\n',
        False,
    ),
    "close": (HEAD + b'\r\n{"a":1}', True),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b'Content-Length: 7\r\n\r\n{"a":1}',
        False,
    ),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_body_is_read_in_every_framing_and_cut(frame, step):
    data, closes = FRAMES[frame]
    response = received(data, step, closes)
    assert (response.status, response.json()) == (200, {"a": 1})
    assert response.headers["content-type"] == "application/json"


def test_a_response_without_a_body_is_complete():
    assert received(b"HTTP/1.1 204 No Content\r\n\r\n", 5).body == b""
    assert received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 5).body == b""


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_events_go_to_the_sink_and_errors_do_not(step):
    body = b"a\r\ndata: one\n\r\n5\r\n\nmore\r\n0\r\n\r\n"
    head = b"HTTP/1.1 %s X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = []
    assert received(head % b"200" + body, step, stream=parts).body == b""
    assert b"".join(parts) == b"data: one\n\nmore"
    parts = []
    assert received(head % b"500" + body, step, stream=parts).body == b"data: one\n\nmore"
    assert parts == []


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 abc\r\n\r\n", InvalidResponse),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", InvalidResponse),
        (b"x" * 70_000, InvalidResponse),
        (HEAD + b"Content-Length: 9\r\n\r\n{}", ConnectionLost),
        (b"HTTP/1.1 2", ConnectionLost),
    ],
)
def test_what_is_not_a_response_fails(data, error):
    with pytest.raises(error):
        received(data, 1000, closes=True)


def requests(url, count):
    async def main():
        client = HttpClient(url)
        try:
            return [
                (await client.request("POST", "/v1/completions", {"n": n})).status
                for n in range(count)
            ]
        finally:
            await client.close()

    return asyncio.run(main())


def test_connections_are_kept():
    with ScriptedServer(lambda *_: stream("a")) as server:
        assert requests(server.url, 3) == [200] * 3
        assert server.connections == 1


def test_a_connection_that_the_server_closed_is_replaced():
    with ScriptedServer(lambda *_: Script(body={}, ends="closed")) as server:
        assert requests(server.url, 3) == [200] * 3
        assert server.connections == 3
        assert len(server.completions) == 3


def test_a_request_on_a_kept_connection_that_is_closed_unanswered_is_sent_again():
    with ScriptedServer(lambda _, n: Script(ends="silent" if n == 1 else "done")) as server:
        assert requests(server.url, 2) == [200] * 2
        assert server.connections == 2
        assert [r.body["n"] for r in server.completions] == [0, 1, 1]


def test_a_request_on_a_new_connection_that_is_closed_is_not_sent_again():
    with ScriptedServer(lambda *_: Script(ends="silent")) as server:
        with pytest.raises(ConnectionLost, match="before the response"):
            requests(server.url, 1)
        assert len(server.completions) == 1


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(ConnectionLost, match=r"cannot connect to 127\.0\.0\.1:1"):
        requests("http://127.0.0.1:1", 1)


def test_urls_are_checked():
    assert parsed_url("localhost:80/v1").hostname == "localhost"
    for url in ("", "ftp://x", "http://", "http://x:0", "http://x:no"):
        with pytest.raises(InvalidRequest, match="URL is"):
            parsed_url(url)
