"""HEAD, targets in absolute form, and refusals of paths and methods that no route has."""

import asyncio
import threading

import http_raw
import openai
import pytest
from http_server import RunningServer

from lmchat.server import MountedApp, ServerConfig
from lmchat.server.http.event_stream import EventStream

ENDED = threading.Event()


async def endless(scope, receive, send):
    """An app that sends events until the client has disconnected."""
    await receive()
    answer = EventStream(forever(), keep_alive_seconds=60, send_seconds=60)
    await answer(scope, receive, send)


async def forever():
    try:
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0)
    finally:
        ENDED.set()


@pytest.fixture(scope="module")
def server():
    with RunningServer(mounts=(MountedApp("/endless", endless),)) as running:
        yield running


def exchange(server, *parts, **options):
    return http_raw.exchange(server.port, http_raw.request(*parts, **options))


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/ready", "/version", "/metrics", "/openapi.json", "/v1/models",
        "/v1/models/memo", "/v1/sessions", "/v2", "/v2/health/live", "/v2/health/ready", "/nothing",
    ],
)  # fmt: skip
def test_head_has_the_headers_of_get_and_no_body(server, path):
    # The bytes that follow on the connection must be the next answer, and no body.
    with http_raw.connected(server.port) as connection:
        connection.sendall(http_raw.request("HEAD", path))
        head = http_raw.answer(connection, "HEAD")
        connection.sendall(http_raw.request("GET", path))
        got = http_raw.answer(connection)
    assert got.body
    assert head.status == got.status
    changing = {"date"} | ({"content-length"} if path == "/metrics" else set())
    assert head.headers.keys() == got.headers.keys()
    assert {n for n in got.headers if got.headers[n] != head.headers[n]} <= changing


def test_head_of_an_event_stream_ends_at_once(server):
    with http_raw.connected(server.port) as connection:
        connection.sendall(http_raw.request("HEAD", "/endless/x"))
        head = http_raw.answer(connection, "HEAD")
        assert ENDED.wait(http_raw.PATIENCE)
        connection.sendall(http_raw.request("GET", "/version"))
        assert head.headers["content-type"].startswith("text/event-stream")
        assert "version" in http_raw.answer(connection).json


def test_head_needs_the_key_that_get_needs():
    with RunningServer(ServerConfig(keys={"secret-a": "ann"})) as server:
        assert exchange(server, "HEAD", "/v1/models").status == 401
        assert exchange(server, "HEAD", "/health").status == 200
        assert exchange(server, "OPTIONS", "*").status == 204
        assert exchange(server, "OPTIONS", "/v1/models").status == 401


def test_a_target_in_absolute_form_is_that_of_its_path(server):
    for target in ("http://localhost/version?a=b", "HTTP://127.0.0.1:1/version"):
        assert "version" in exchange(server, "GET", target).json
    assert exchange(server, "OPTIONS", "http://localhost").status == 204
    assert "GET /," in exchange(server, "GET", "http://localhost").json["error"]["message"] + ","


def test_the_host_of_the_target_holds_and_not_that_of_the_header(server):
    target = "http://evil.example/version"
    assert exchange(server, "GET", target).status == 403
    evil = [("Host", "evil.example")]
    assert exchange(server, "GET", "http://localhost/version", evil).status == 200


@pytest.mark.parametrize(
    "target", ["ftp://localhost/version", "http:///version", "http://ann@localhost/version"]
)
def test_a_target_that_is_not_a_url_of_the_server_is_refused(server, target):
    assert exchange(server, "GET", target).status == 400


@pytest.mark.parametrize("base", ["", "/v1/v1", "/api", "/v1/openai", "/openai/deployments/memo"])
def test_a_wrong_base_url_is_answered_with_the_right_one(server, base):
    client = openai.OpenAI(base_url=server.url + base, api_key="none", max_retries=0)
    with client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="memo", messages=[])
    assert caught.value.code == "unknown_url"
    assert caught.value.body["message"] == (
        f"no such route: POST {base}/chat/completions, expected POST /v1/chat/completions: "
        f"the base URL is {server.url}/v1"
    )


def test_an_unknown_path_is_named_and_cut(server):
    client = server.client()
    assert "no such route: GET /v3/x" in client.get("/v3/x").json()["error"]["message"]
    assert client.get("/v1/health").json()["error"]["message"].endswith(server.url)
    assert client.get("/v2/nothing").json()["error"].startswith("no such route: GET /v2/nothing")
    long = client.get("/%1b" + "/x" * 4000).json()["error"]["message"]
    assert "\x1b" not in long
    assert len(long) < 300


def test_a_method_that_the_path_lacks_is_named_with_those_it_has(server):
    answer = server.client().delete("/v1/sessions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert answer.json()["error"]["message"] == (
        "DELETE is not a method of /v1/sessions, expected GET or HEAD or POST"
    )
    assert server.client().get("/v1/chat/completions").headers["allow"] == "POST"
