"""A client that disconnects stops its generations; errors of a stream that has begun."""

import json
import socket
import time

import pytest
from http_server import RunningServer
from openai_bodies import stream

from lmchat.errors import InternalError
from lmchat.server.openai.replying import failure

LONG = {"ignore_eos": True, "max_tokens": 1900, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Tell me all."}]


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


def idle_tokens(server):
    """Waits until the engine has no request, and returns the tokens it has generated."""
    deadline = time.monotonic() + 30
    while True:
        stats = server.engine.sync.stats()
        if stats.slots == 0 and stats.waiting == 0:
            return stats.tokens_decoded
        assert time.monotonic() < deadline, "the generation goes on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, 3),
        ("/v1/chat/completions", {"messages": MESSAGES, "session": "left"}, 1),
        ("/v1/completions", {"prompt": ["One", "Two"]}, 2),
    ],
)
def test_leaving_a_stream_stops_its_generations(server, path, body, choices):
    before = idle_tokens(server)
    events = stream(server.client(), path, {**body, **LONG})
    for _ in range(4):
        next(events)
    events.close()
    assert idle_tokens(server) - before < choices * 1800


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/chat/completions", {"messages": MESSAGES, "session": "gone"}, 1),
        ("/v1/completions", {"prompt": ["One", "Two"], "n": 2}, 4),
    ],
)
def test_leaving_before_an_answer_stops_its_generations(server, path, body, choices):
    before = idle_tokens(server)
    content = json.dumps({**body, **LONG}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        while server.engine.sync.stats().tokens_decoded == before:
            time.sleep(0.001)
    assert idle_tokens(server) - before < choices * 1800


def test_a_left_turn_keeps_what_was_produced(server):
    body = {"messages": MESSAGES, "session": "kept", **LONG}
    events = stream(server.client(), "/v1/chat/completions", body)
    shown = [next(events)["choices"][0]["delta"].get("content") or "" for _ in range(6)]
    events.close()
    idle_tokens(server)
    found = server.call(server.engine.session("kept")).sync
    while found.running is not None:
        time.sleep(0.01)
    assert found.turns[-1].text.startswith("".join(shown))
    assert found.turns[-1].finish_reason == "cancelled"


def test_an_error_within_a_stream_is_an_event():
    error, done = failure(InternalError("a secret path")).decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    found = json.loads(error.removeprefix("data: "))["error"]
    assert found["code"] == "internal_error"
    assert "secret" not in found["message"]


def test_an_engine_that_closes_ends_a_stream():
    with RunningServer() as server:
        events = stream(server.client(), "/v1/chat/completions", {"messages": MESSAGES, **LONG})
        next(events)
        server.engine.sync.close()
        rest = list(events)
        assert rest[-1] == "[DONE]"
        answer = server.client().post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
