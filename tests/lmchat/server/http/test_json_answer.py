"""Answers that are encoded in pieces: the same JSON, no large piece, and not on the loop."""

import json
import threading

import pytest
from http_server import RunningServer
from hypothesis import given
from hypothesis import strategies as st

from lmchat.server.http import json_answer
from lmchat.server.http.json_answer import encoded

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=30,
)


@given(VALUES, st.booleans())
def test_the_json_is_that_of_the_library(value, ascii_only):
    options = {"ensure_ascii": ascii_only, "separators": (",", ":")}
    try:
        expected = json.dumps(value, **options).encode()
    except UnicodeEncodeError:
        return
    assert encoded(value, ascii_only=ascii_only) == expected


def test_nan_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        encoded({"x": [float("nan")]})


def test_no_piece_is_large(monkeypatch):
    entry = {"logprob": -0.123456789, "top": [[i, -0.123456789] for i in range(20)]}
    reply = {"turn": 5, "token_ids": list(range(100_000)), "logprobs": [entry] * 3000}
    value = {"object": "session", "turns": [reply], **reply, "others": [reply]}
    sizes, whole = [], json.JSONEncoder.encode

    def counting(self, value):
        text = whole(self, value)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", counting)
    assert len(encoded(value)) > 4_000_000
    assert max(sizes) < 30_000


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


def test_answers_are_encoded_in_other_threads(server, monkeypatch):
    names, whole = [], json_answer._pieces

    def pieces(*arguments):
        names.append(threading.current_thread())
        return whole(*arguments)

    monkeypatch.setattr(json_answer, "_pieces", pieces)
    client = server.client()
    path = client.post("/v1/sessions", json={}).headers["location"]
    settings = {"max_new_tokens": 3, "logprobs": 2}
    turn = {"text": "Hi", "settings": settings, "token_ids": True}
    requests = [
        ("POST", f"{path}/turns", turn),
        ("POST", f"{path}/turns", {**turn, "stream": True}),
        ("GET", path, None),
        ("GET", f"{path}/branches?turn=0&details=true", None),
        ("GET", f"{path}/replies?details=true", None),
        ("POST", f"{path}/fork?details=true", {}),
        ("POST", f"{path}/stop", {}),
        ("POST", "/v1/engine/generate", {"prompt": "Hi", "settings": settings}),
        ("POST", "/v1/engine/score", {"prompt": "Once upon"}),
        ("POST", "/v1/engine/tokens", {"prompt": "Once upon"}),
        ("POST", "/v1/engine/texts", {"token_ids": [5, 6]}),
        ("POST", "/tokenize", {"prompt": "Once upon"}),
        ("POST", "/detokenize", {"tokens": [5, 6]}),
    ]
    for method, path, body in requests:
        names.clear()
        assert client.request(method, path, json=body).status_code in (200, 201)
        assert names, path
        assert server._thread not in names
