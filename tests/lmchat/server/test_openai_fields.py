"""Fields of requests: supported ranges, ignored ones, and refusals by name."""

import json

import pytest
from assets import ROOT
from http_server import RunningServer
from openai_bodies import refused

from lmchat.server.openai.chat import ChatBody
from lmchat.server.openai.completions import CompletionBody

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 1}
COMPLETION = {"prompt": "Hi", "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f"}}

REFUSED = [
    ("temperature", 2.1), ("temperature", -0.1), ("temperature", "1"), ("temperature", True),
    ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
    ("n", 0), ("n", 9), ("n", "2"), ("seed", 1 << 64), ("seed", -(1 << 63) - 1), ("seed", 0.5),
    ("max_tokens", 0), ("max_tokens", 1 << 40), ("min_tokens", -1), ("min_tokens", 2),
    ("stop", 5), ("stop", [5]), ("stop", ["a"] * 17), ("stop", "a" * 257), ("stop", ""),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1),
    ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"-5": 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("stream", "yes"),
    ("stream_options", {"unknown": 1}), ("request_id", "a b"), ("request_id", "a" * 65),
    ("response_format", {"type": "json_object"}), ("unknown", 1), ("use_beam_search", True),
    ("guided_json", {}), ("structured_outputs", {}), ("best_of", 5), ("echo", True),
    ("prompt_logprobs", 1), ("truncate_prompt_tokens", 5), ("include_stop_str_in_output", True),
    ("bad_words", ["a"]), ("priority", 1), ("cache_salt", "a"), ("lora_request", {}),
]  # fmt: skip

REFUSED_CHAT = [
    ("tools", [TOOL]), ("tool_choice", "required"), ("functions", [{}]), ("audio", {}),
    ("modalities", ["text", "audio"]), ("prediction", {}), ("web_search_options", {}),
    ("reasoning_effort", "high"), ("verbosity", "low"), ("moderation", {}), ("top_logprobs", 3),
    ("max_completion_tokens", 0), ("chat_template", "x"), ("chat_template_kwargs", 5),
    ("add_generation_prompt", False), ("logprobs", 1), ("messages", []), ("messages", "Hi"),
    ("messages", MESSAGES * 1025), ("session", ""),
]  # fmt: skip

REFUSED_COMPLETION = [("logprobs", 21), ("logprobs", True), ("suffix", "a"), ("prompt", 5)]

IGNORED = {
    "user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": True,
    "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "session_id": "s",
}  # fmt: skip

NEUTRAL_CHAT = {
    "n": 1, "stop": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
    "response_format": {"type": "text"}, "modalities": ["text"], "logprobs": False, "top_p": 1,
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "seed": -5, "top_k": -1,
    "min_p": 0, "min_tokens": 0, "ignore_eos": False, "repetition_penalty": 1.0,
    "stop_token_ids": [], "skip_special_tokens": True, "stream": False, "echo": False,
    "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {},
    "verbosity": "medium", "use_beam_search": False, "length_penalty": 1.0, "priority": 0,
}  # fmt: skip

NEUTRAL_COMPLETION = {
    "n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": None, "top_p": 0,
    "use_beam_search": False, "spaces_between_special_tokens": True, "temperature": 2,
    "add_special_tokens": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    with RunningServer() as server:
        yield server.client()


@pytest.mark.parametrize(("field", "value"), REFUSED + REFUSED_CHAT)
def test_a_chat_field_is_refused_by_name(client, field, value):
    error = refused(client, "/v1/chat/completions", {**CHAT, field: value})
    assert error["param"].split("[")[0].split(".")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(("field", "value"), REFUSED + REFUSED_COMPLETION)
def test_a_completion_field_is_refused_by_name(client, field, value):
    error = refused(client, "/v1/completions", {**COMPLETION, field: value})
    assert error["param"].split("[")[0].split(".")[0] == field
    assert field in error["message"]


def test_ignored_and_default_fields_are_accepted(client):
    for path, body in (
        ("/v1/chat/completions", {**CHAT, **IGNORED, **NEUTRAL_CHAT}),
        ("/v1/completions", {**COMPLETION, **IGNORED, **NEUTRAL_COMPLETION}),
    ):
        assert client.post(path, json=body).status_code == 200, client.post(path, json=body).text


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_every_field_may_be_null(client, kind):
    names = {*kind.model_fields, *kind.NEUTRAL, *kind.IGNORED} - {"messages", "prompt"}
    path, body = (
        ("/v1/chat/completions", CHAT) if kind is ChatBody else ("/v1/completions", COMPLETION)
    )
    sent = {**dict.fromkeys(names), **body}
    assert client.post(path, json=sent).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "Hi"}, "messages[0].role"),
        ({"role": "tool", "content": "Hi", "tool_call_id": "a"}, None),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "Hi", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "Hi", "audio": {}}, "messages[0].audio"),
        ({"role": "user", "content": "Hi", "reasoning": "x"}, "messages[0].reasoning_content"),
        ({"role": "user", "content": "Hi", "more": 1}, "messages[0].more"),
        ("Hi", "messages[0]"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(client, message, param):
    error = refused(client, "/v1/chat/completions", {"messages": [message]})
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("name", ["messages", "now", "add_generation_prompt", "tools"])
def test_variables_of_the_server_are_refused(client, name):
    body = {**CHAT, "chat_template_kwargs": {name: 1}}
    assert refused(client, "/v1/chat/completions", body)["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("stream", [True, False])
def test_token_ids_outside_the_vocabulary_are_refused(client, stream):
    for field, value in (("logit_bias", {"9999999": 1}), ("stop_token_ids", [9999999])):
        error = refused(client, "/v1/chat/completions", {**CHAT, field: value, "stream": stream})
        assert error["param"].startswith(field)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '"a"', "null", "nan", '{"messages": NaN}', "{" * 500]
)
def test_a_body_that_is_no_object_is_refused(client, text):
    answer = client.post(
        "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


HOSTILE = {
    "messages": "[" + ",".join(["{}"] * 200_000) + "]",
    "a": "1, " + ",".join(f'"a{i}": 1' for i in range(50_000)),
    "logit_bias": "{" + ",".join(f'"{i}": 1' for i in range(100_000)) + "}",
    "stop": "[" + ",".join(['"a"'] * 200_000) + "]",
    "stop_token_ids": "[" + ",".join(['"a"'] * 200_000) + "]",
    "model": '"' + "a" * 1_000_000 + '"',
    "chat_template_kwargs": "{" + ",".join(f'"a{i}": [1]' for i in range(1000)) + "}",
}


@pytest.mark.parametrize("field", HOSTILE)
def test_a_large_field_is_refused_with_a_short_error(client, field):
    rest = "" if field == "messages" else f'"messages": {json.dumps(MESSAGES)}, '
    answer = client.post(
        "/v1/chat/completions",
        content=f'{{{rest}"{field}": {HOSTILE[field]}}}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code in (400, 404, 413)  # 413: too many values in the whole body
    assert len(answer.text) < 1000


def test_huge_numbers_and_names_give_short_errors(client):
    for field, value in (("seed", "1" + "0" * 5000), ("x" * 5000, "1"), ("top_p", "1e999")):
        text = json.dumps(CHAT)[:-1] + f', "{field}": {value}}}'
        answer = client.post(
            "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert len(answer.text) < 3000


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_the_page_lists_all_fields(kind):
    page = (ROOT / "docs" / "server-openai.md").read_text(encoding="utf-8")
    names = {*kind.model_fields, *kind.NEUTRAL, *kind.IGNORED} - {"model", "stream_options"}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_an_unknown_model_is_not_found(client):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        error = refused(client, path, {**body, "model": "gpt-4"}, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
