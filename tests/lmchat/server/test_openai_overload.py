"""Requests that the queue has no place for."""

import openai
import pytest
from http_server import RunningServer
from openai_bodies import refused, stream

MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 1900}


@pytest.fixture(scope="module")
def server():
    """A server whose only slot is taken, and whose queue has no place."""
    with RunningServer(max_batch_size=1, max_queue=0) as found:
        running = stream(found.client(), "/v1/chat/completions", LONG)
        next(running)
        yield found
        running.close()


BODIES = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": ["Hi", "Ho"], "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_refused_request_says_when_to_come_again(server, path, body):
    client = server.client()
    assert refused(client, path, body, 429)["code"] == "overloaded"
    headers = client.post(path, json=body).headers
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1


def test_a_refused_turn_creates_no_session(server):
    body = {"messages": MESSAGES, "session": "refused"}
    assert refused(server.client(), "/v1/chat/completions", body, 429)["code"] == "overloaded"
    assert server.engine.sync.sessions("local") == []


def test_openai_python_reports_a_rate_limit(server):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.chat.completions.create(model="memo", messages=MESSAGES)
