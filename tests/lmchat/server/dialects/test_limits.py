"""Bounds that hold in every dialect: settings, template variables, parts, JSON inside of JSON."""

import json
from dataclasses import replace

import pytest
from http_server import RunningServer

from lmchat.server import Limits, ServerConfig

LIMITS = replace(
    Limits(), messages=4, top_logprobs=3, choices=2, stop_strings=2, stop_bytes=5, logit_bias=3
)
MESSAGES = [{"role": "user", "content": "Hi"}]
V2 = "/v2/models/memo/generate"

# The requests of each dialect, and how each writes settings of the engine.
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/sessions/ID/turns": {"text": "Hi"},
    "/v1/sessions/ID/retry": {},
    "/v1/sessions": {},
    "PATCH /v1/sessions/ID": {},
    "/v1/engine/generate": {"prompt": "Hi"},
    V2: {"text_input": "Hi"},
}
OPENAI = {
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "stop_strings": {"stop": ["a", "b", "c"]},
    "stop_bytes": {"stop": ["a", "123456"]},
    "min_new_tokens": {"min_tokens": 9, "max_tokens": 8},
    "n": {"n": 3},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(4)}},
    "stop_token_ids": {"stop_token_ids": [5, 6, 7, 8]},
}
ENGINE = {
    "logprobs": {"logprobs": 4},
    "stop_strings": {"stop_strings": ["a", "b", "c"]},
    "stop_bytes": {"stop_strings": ["a", "123456"]},
    "min_new_tokens": {"min_new_tokens": 9, "max_new_tokens": 8},
    "n": {"n": 3},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(4)}},
    "stop_token_ids": {"stop_token_ids": [5, 6, 7, 8]},
}
RESPONSES = {
    name: {"max_output_tokens" if field == "max_tokens" else field: value
           for field, value in fields.items() if field != "logprobs"}
    for name, fields in OPENAI.items() if name not in ("n", "logit_bias", "stop_token_ids")
}  # fmt: skip
WRITTEN = {
    "/v1/chat/completions": OPENAI,
    "/v1/completions": {**OPENAI, "logprobs": {"logprobs": 4}},
    "/v1/responses": RESPONSES,
    V2: {name: fields for name, fields in ENGINE.items() if name not in ("n", "logprobs")},
}
CASES = [
    (path, name, fields) for path in BODIES for name, fields in WRITTEN.get(path, ENGINE).items()
]


@pytest.fixture(scope="module")
def server():
    with RunningServer(ServerConfig(limits=LIMITS)) as found:
        yield found


@pytest.fixture(scope="module")
def post(server):
    client = server.client()
    session = client.post("/v1/sessions", json={}).json()["id"]
    body = {"text": "Hi", "settings": {"max_new_tokens": 2}}
    assert client.post(f"/v1/sessions/{session}/turns", json=body).status_code == 200

    def send(path, body):
        method, _, path = path.rpartition(" ")
        return client.request(method or "POST", path.replace("ID", session), json=body)

    return send


@pytest.mark.parametrize(("path", "name", "fields"), CASES)
def test_settings_have_the_same_bounds_everywhere(post, path, name, fields):
    settings = fields if path in WRITTEN else {"settings": fields}
    answer = post(path, {**BODIES[path], **settings})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "expected at most" in (error if path == V2 else error["message"])
    if path != V2:
        places = {*fields} if path in WRITTEN else {f"settings.{field}" for field in ENGINE[name]}
        assert error["param"].partition("[")[0] in places


def test_settings_at_the_bounds_are_accepted(post):
    body = {"logprobs": 3, "stop_strings": ["12345", "b"], "logit_bias": {"1": 1, "2": 1, "3": 1},
            "max_new_tokens": 2, "min_new_tokens": 2}  # fmt: skip
    assert post("/v1/sessions/ID/turns", {"text": "Hi", "settings": body}).status_code == 200
    assert post("/v1/engine/generate", {"prompt": "Hi", "settings": body}).status_code == 200


@pytest.mark.parametrize(
    "variables", [{"x": [1] * 1100}, {"x": {"y": [[1] * 600, [2] * 600]}}, {"x": "a" * 70_000}]
)
@pytest.mark.parametrize("path", BODIES.keys() - {V2, "/v1/completions", "/v1/sessions/ID/retry"})
def test_template_variables_are_bounded(post, path, variables):
    is_openai = path in WRITTEN
    field = "chat_template_kwargs" if is_openai else "template_variables"
    body = {"messages": MESSAGES} if path == "/v1/engine/generate" else BODIES[path]
    error = post(path, {**body, field: variables}).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is ")


def parts(count):
    return [{"type": "text", "text": "a"}] * count


def test_the_parts_of_all_messages_are_bounded(post):
    def answer(*counts):
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": parts(count)}
            for i, count in enumerate(counts)
        ]
        return post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})

    assert answer(14, 1, 1).status_code == 200
    error = answer(14, 1, 2).json()["error"]
    assert error["param"] == "messages[2].content"
    assert "at most 16 in all messages" in error["message"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 17}]
    error = post("/v1/responses", {"input": items}).json()["error"]
    assert "at most 16 in all messages" in error["message"]


def test_json_inside_of_json_is_bounded(post):
    def answer(text):
        return post(V2, {"text_input": "Hi", "sampling_parameters": text})

    nested = {"max_tokens": 1}
    assert answer(json.dumps(nested)).status_code == 200
    assert answer(nested).status_code == 200
    large = answer(json.dumps({**nested, "bad_words": ["a"] * 20_000}))
    assert large.status_code == 413
    assert "expected at most 65536" in large.json()["error"]
    assert answer({str(i): i for i in range(100)}).json()["error"].startswith("100 parameters")
    assert answer(5).status_code == 400
