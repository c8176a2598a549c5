"""A wrong setting has its name at every door: in Python, of a remote engine, over HTTP."""

import json

import pytest
from http_server import RunningServer

import lmchat
from lmchat.cli.chat.setting_values import parse_pairs
from lmchat.generation.settings import ROWS, SETTINGS
from lmchat.webui.form import NUMBERS, changed
from turbomind.shown import shown

WRONG = {
    "max_new_tokens": 0,
    "min_new_tokens": -1,
    "do_sample": "no",
    "temperature": -1,
    "top_k": -2,
    "top_p": 2,
    "min_p": 3,
    "repetition_penalty": 0,
    "presence_penalty": "high",
    "frequency_penalty": "high",
    "logit_bias": {"5": 1, "999999": 7},
    "bad_words": [[5], [5, 999999]],
    "stop_strings": ["a", ""],
    "stop_token_ids": [5, 999999],
    "eos_token_ids": [999999],
    "ignore_eos": 5,
    "seed": 1 << 64,
    "exact": "yes",
    "logprobs": 300,
}
"""A wrong value of each setting."""

PLACES = {
    "logit_bias": (".999999", 7),
    "bad_words": ("[1][1]", 999999),
    "stop_strings": ("[1]", ""),
    "stop_token_ids": ("[1]", 999999),
    "eos_token_ids": ("[0]", 999999),
}
"""What is wrong within the value, where it has several."""

OWN_RANGES = {
    "temperature": "a number from 0 to 2",
    "top_k": "an integer from -1 to 2147483647",
    "top_p": "a number from 0 to 1",
    "repetition_penalty": "a number above 0, at most 100",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "seed": "an integer from -9223372036854775808 to 18446744073709551615",
}
"""What OpenAI's dialects expect of settings to which they give ranges of their own."""

MESSAGES = [{"role": "user", "content": "Hi"}]
OPENAI = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "logprobs": "top_logprobs",
}
_NOT_OPENAI = {"do_sample", "exact", "bad_words", "eos_token_ids"}


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running


@pytest.fixture(scope="module")
def doors(server):
    """Each door: takes the name of a setting and its value, and returns the name that the refusal
    should have, that which it has, and its message. None: the door has no such setting."""
    local, client = server.engine.sync, server.client()
    with lmchat.connect(server.url) as remote:

        def python(call):
            def refused(name, value):
                with pytest.raises(lmchat.InvalidRequest) as caught:
                    call(**{name: value})
                return name, caught.value.param, str(caught.value)

            return refused

        def http(path, body, field, method="POST"):
            def refused(name, value):
                expected = field(name)
                if expected is None:
                    return None
                answer = client.request(method, path, json=body(name, value))
                assert answer.status_code == 400
                error = answer.json()["error"]
                if isinstance(error, str):  # the Open Inference Protocol has a message only
                    return expected, None, error
                assert error["type"] == "invalid_request_error"
                return expected, error["param"], error["message"]

            return refused

        def openai(name):
            return None if name in _NOT_OPENAI else OPENAI.get(name, name)

        def completion(name):
            return name if name == "logprobs" else openai(name)

        def response(name):
            return "max_output_tokens" if name == "max_new_tokens" else openai(name)

        def spelled(name):
            return {"max_new_tokens": "max_tokens", "stop_strings": "stop"}.get(name, name)

        chats = {"local": local.session("local"), "remote": remote.session("remote")}
        path = f"/v1/sessions/{chats['remote'].id}"
        settings = "settings.{}".format

        def of_settings(more):
            return lambda name, value: {**more, "settings": {name: value}}

        def beside(more, field):
            return lambda name, value: {**more, field(name): value}

        def command_line(name, value):
            with pytest.raises(lmchat.InvalidRequest) as caught:
                chats["local"].set(**parse_pairs([f"{name}={json.dumps(value)}"]))
            return name, caught.value.param, str(caught.value)

        def form(name, value):
            if name not in NUMBERS:
                return None
            with pytest.raises(lmchat.InvalidRequest) as caught:
                chats["local"].update(**changed(local.template_info, name, json.dumps(value)))
            return name, caught.value.param, str(caught.value)

        yield {
            "--set": command_line,
            "form": form,
            "generate": python(lambda **given: local.generate("Hi", **given)),
            "chat": python(lambda **given: local.chat(MESSAGES, **given)),
            "send": python(lambda **given: chats["local"].send("Hi", **given)),
            "set": python(lambda **given: chats["local"].set(**given)),
            "remote generate": python(lambda **given: remote.generate("Hi", **given)),
            "remote send": python(lambda **given: chats["remote"].send("Hi", **given)),
            "remote set": python(lambda **given: chats["remote"].set(**given)),
            "/v1/chat/completions": http(
                "/v1/chat/completions",
                beside({"messages": MESSAGES, "logprobs": True}, openai),
                openai,
            ),
            "/v1/completions": http(
                "/v1/completions", beside({"prompt": "Hi"}, completion), completion
            ),
            "/v1/responses": http("/v1/responses", beside({"input": "Hi"}, response), response),
            "turns": http(f"{path}/turns", of_settings({"text": "Hi"}), settings),
            "PATCH": http(path, of_settings({}), settings, "PATCH"),
            "sessions": http("/v1/sessions", of_settings({}), settings),
            "/v1/engine": http("/v1/engine/generate", of_settings({"prompt": "Hi"}), settings),
            "/v2": http(
                "/v2/models/memo/generate",
                beside({"text_input": "Hi"}, spelled),
                lambda name: None if name == "logprobs" else spelled(name),
            ),
        }


DOORS = (
    "generate", "chat", "send", "set", "remote generate", "remote send", "remote set",
    "/v1/chat/completions", "/v1/completions", "/v1/responses",
    "turns", "PATCH", "sessions", "/v1/engine", "/v2", "--set", "form",
)  # fmt: skip


def test_every_setting_has_a_wrong_value():
    assert set(WRONG) == set(SETTINGS)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("door", DOORS)
def test_a_wrong_setting_is_refused_by_its_name(doors, door, name):
    place, seen = PLACES.get(name, ("", WRONG[name]))
    found = doors[door](name, WRONG[name])
    if found is None:
        return
    expected, param, message = found
    if door != "/v2":
        assert param == expected + place
    start = f"{expected}{place} is {shown(seen)}, expected "
    assert message.startswith(start)
    words = message.removeprefix(start)
    if name in OWN_RANGES and door in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert words == OWN_RANGES[name]
    elif not place and name != "logprobs":  # at most as many as the server's limit or vocabulary
        assert words == ROWS[name].expected
    else:
        assert words


@pytest.mark.parametrize("door", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_too_many_entries_are_no_wrong_kind(doors, door):
    for count, most in ((1 << 14) + 1, 1 << 14), (1 << 14, 1024):
        _, param, message = doors[door]("stop_token_ids", [5] * count)
        assert param == "stop_token_ids"
        assert message.endswith(f", expected at most {most}{' entries' * (count > 1 << 14)}")


@pytest.mark.parametrize("door", ["send", "set", "remote send", "remote set", "turns", "PATCH"])
def test_an_unknown_setting_is_named(doors, door):
    expected, param, message = doors[door]("temprature", 1)
    assert param == expected
    assert message == "unknown setting 'temprature'; did you mean 'temperature'?"


def test_a_full_context_names_the_field_of_the_limit(server):
    body = {"messages": MESSAGES, "max_completion_tokens": 10**6}
    for sent, field in (
        ({**body, "stream": True}, "max_completion_tokens"),
        (body, "max_completion_tokens"),
        ({"messages": MESSAGES, "max_tokens": 10**6}, "max_tokens"),
    ):
        answer = server.client().post("/v1/chat/completions", json=sent)
        error = json.loads(answer.content)["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert error["message"].startswith(f"{field} is 1000000, expected at most ")
        assert "maximum context length is" in error["message"]
