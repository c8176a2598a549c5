"""Texts that are too long for the context, in every dialect: they are refused, not encoded."""

import threading
from dataclasses import replace

import pytest
from http_server import RunningServer

import lmchat.text.tokenizer
from lmchat.server import Limits, ServerConfig

COUNTED = 1 << 16
TEXT = "a long text " * 20_000
USER = [{"role": "user", "content": TEXT}]
ROUND = [*USER, {"role": "assistant", "content": "Hi"}]

GENERATING = {
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "chat, many": ("/v1/chat/completions", {"messages": [
        {"role": ("user", "assistant")[i % 2], "content": TEXT[:4000]} for i in range(101)
    ]}),
    "chat, reasoning": ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi", "reasoning_content": TEXT},
        {"role": "user", "content": "Hi"},
    ]}),
    "chat, session": ("/v1/chat/completions", {"messages": USER, "session": "large"}),
    "completion": ("/v1/completions", {"prompt": ["Hi", TEXT]}),
    "completion, no BOS": ("/v1/completions", {"prompt": TEXT, "add_special_tokens": False}),
    "response": ("/v1/responses", {"input": TEXT}),
    "response, instructions": ("/v1/responses", {"input": "Hi", "instructions": TEXT}),
    "response, not stored": ("/v1/responses", {"input": TEXT, "store": False}),
    "turn": ("/v1/sessions/ID/turns", {"text": TEXT}),
    "turn, before": ("/v1/sessions/ID/turns", {"text": "Hi", "before": ROUND}),
    "turn, system": ("/v1/sessions/ID/turns", {"text": "Hi", "system": TEXT}),
    "edit": ("/v1/sessions/ID/edit", {"turn": 0, "text": TEXT}),
    "append": ("/v1/sessions/ID/append", {"messages": ROUND}),
    "new session": ("/v1/sessions", {"system": TEXT}),
    "engine": ("/v1/engine/generate", {"prompt": TEXT}),
    "engine, messages": ("/v1/engine/generate", {"messages": USER}),
    "score": ("/v1/engine/score", {"prompt": TEXT}),
    "generate": ("/v2/models/memo/generate", {"text_input": TEXT}),
    "generate_stream": ("/v2/models/memo/generate_stream", {"text_input": TEXT}),
    "infer": ("/v2/models/memo/infer", {"inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
    ]}),
}  # fmt: skip
COUNTING = {
    "tokenize": ("/tokenize", {"prompt": TEXT}),
    "tokenize, messages": ("/tokenize", {"messages": USER}),
    "engine": ("/v1/engine/tokens", {"prompt": TEXT}),
    "engine, messages": ("/v1/engine/tokens", {"messages": USER}),
    "count_tokens": ("/v1/sessions/ID/count_tokens", {"text": TEXT}),
    "count_tokens, before": ("/v1/sessions/ID/count_tokens", {"text": "Hi", "before": ROUND}),
    "count_tokens, system": ("/v1/sessions/ID/count_tokens", {"text": "Hi", "system": TEXT}),
    "input_tokens": ("/v1/responses/input_tokens", {"input": TEXT}),
}


@pytest.fixture(scope="module")
def server():
    with RunningServer(ServerConfig(limits=replace(Limits(), counted=COUNTED))) as found:
        yield found


@pytest.fixture(scope="module")
def session(server):
    client = server.client()
    found = client.post("/v1/sessions", json={}).json()["id"]
    body = {"text": "Hi", "settings": {"max_new_tokens": 2}}
    assert client.post(f"/v1/sessions/{found}/turns", json=body).status_code == 200
    return found


@pytest.fixture
def encoded(server, monkeypatch):
    """The lengths of the texts that are encoded. None may be on the event loop's thread."""
    lengths, whole = [], lmchat.text.tokenizer._encoding

    def encoding(backend, text, add_special_tokens=False):
        assert threading.current_thread() is not server._thread
        lengths.append(len(text))
        return whole(backend, text, add_special_tokens)

    monkeypatch.setattr(lmchat.text.tokenizer, "_encoding", encoding)
    return lengths


@pytest.mark.parametrize("name", GENERATING)
def test_what_no_context_holds_is_not_encoded(server, session, encoded, name):
    path, body = GENERATING[name]
    answer = server.client().post(path.replace("ID", session), json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "expected at most 30720" in (error if isinstance(error, str) else error["message"])
    if not path.startswith("/v2"):
        assert error["code"] == "context_length_exceeded"
    assert sum(encoded) < 1000


@pytest.mark.parametrize("name", COUNTING)
def test_counting_has_a_limit_of_its_own(server, session, encoded, name):
    path, body = COUNTING[name]
    answer = server.client().post(path.replace("ID", session), json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "text_too_large")
    assert not encoded


def test_more_than_the_context_is_counted(server, session):
    text, client = TEXT[: COUNTED - 1000], server.client()
    tokens = client.post("/tokenize", json={"prompt": text}).json()["count"]
    assert tokens > server.engine.max_context
    body = {"text": text}
    count = client.post(f"/v1/sessions/{session}/count_tokens", json=body).json()["count"]
    assert count > tokens - 10


def test_the_cost_of_a_refusal_is_that_of_the_context(server, encoded):
    """A text that some tokens of the longest kind would hold is encoded in part."""
    text = TEXT[:28_000]
    answer = server.client().post("/v1/completions", json={"prompt": text})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "has more than" in answer.json()["error"]["message"]
    assert sum(encoded) < len(text)
