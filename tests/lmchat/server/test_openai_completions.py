"""Completions: prompts of all kinds, in OpenAI's types."""

import pytest
from http_server import RunningServer
from openai_bodies import completion, completion_stream, refused, stream


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def test_an_answer_has_the_engines_reply(server, client):
    found = completion(client, model="memo", prompt="My dog", max_tokens=8, ignore_eos=True)
    reply = server.call(server.engine.generate("My dog", max_new_tokens=8, ignore_eos=True))
    assert found.choices[0].text == reply.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 8


def test_the_default_length_is_openais(client):
    found = completion(client, prompt="My dog", ignore_eos=True)
    assert found.usage.completion_tokens == 16


def test_prompts_of_all_kinds(server, client):
    ids = server.engine.tokenizer.encode("My dog")
    others = server.engine.tokenizer.encode("A cat")
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    first = completion(client, prompt="My dog", **body).choices[0].text
    second = completion(client, prompt="A cat", **body).choices[0].text
    assert completion(client, prompt=ids, **body).choices[0].text == first
    for prompts in (["My dog", "A cat"], [ids, others], ["My dog", others]):
        found = completion(client, prompt=prompts, **body)
        assert [(one.index, one.text) for one in found.choices] == [(0, first), (1, second)]


def test_several_prompts_stream_with_the_choices_of_each(client):
    body = {"prompt": ["My dog", "A cat"], "n": 2, "max_tokens": 6, "temperature": 1, "seed": 3}
    whole = completion(client, **body)
    chunks = completion_stream(client, **body)
    for choice in whole.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.text for one in parts) == choice.text
    assert len(whole.choices) == 4


def test_progress_of_several_prompts_is_that_of_all(client):
    prompts = ["One prompt is of these. " * 20, "And another one of those. " * 30]
    body = {"prompt": prompts, "max_tokens": 1, "return_progress": True}
    events = list(stream(client, "/v1/completions", body))
    found = [e["prompt_progress"] for e in events if e != "[DONE]" and "prompt_progress" in e]
    usage = completion(client, prompt=prompts, max_tokens=1).usage
    assert found[-1]["processed"] == found[-1]["total"] == usage.prompt_tokens


def test_logprobs_have_tokens_and_offsets(server, client):
    body = {"prompt": "My dog", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = completion(client, logprobs=2, **body).choices[0]
    reply = server.call(
        server.engine.generate(
            "My dog", max_new_tokens=8, temperature=0, ignore_eos=True, logprobs=2
        )
    )
    logprobs = found.logprobs
    assert logprobs.token_logprobs == [one.logprob for one in reply.logprobs]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("<|") or found.text.startswith(token, offset)
    assert all(len(best) in (2, 3) for best in logprobs.top_logprobs)
    parts = [chunk.choices[0].logprobs for chunk in completion_stream(client, logprobs=2, **body)]
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [one for part in parts if part for one in getattr(part, field)]
        assert joined == getattr(logprobs, field)


def test_zero_logprobs_are_those_of_the_tokens_alone(client):
    found = completion(client, prompt="My dog", logprobs=0, max_tokens=3).choices[0]
    assert len(found.logprobs.token_logprobs) == len(found.logprobs.tokens)
    assert found.logprobs.top_logprobs is None


def test_usage_comes_last_when_it_is_wanted(client):
    options = {"include_usage": True}
    chunks = completion_stream(client, prompt="My dog", max_tokens=4, stream_options=options)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], None),
        ([10**9], None),
        ([-1], None),
        ({}, "prompt"),
        (["a"] * 65, "prompt"),
        ([1] * 5000, "prompt"),
    ],
)
def test_a_wrong_prompt_is_refused(client, prompt, param):
    error = refused(client, "/v1/completions", {"prompt": prompt})
    if param is not None:
        assert error["param"] == param


def test_the_default_length_is_cut_to_the_room_and_a_given_one_refused(server, client):
    most = server.engine.max_context
    prompt = [5] * (most - 4)
    found = completion(client, prompt=prompt, ignore_eos=True)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (4, "length")
    error = refused(client, "/v1/completions", {"prompt": prompt, "max_tokens": 5})
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert error["message"].startswith("max_tokens is 5, expected at most 4 after")
    # The words by which LiteLLM and other clients tell it from other wrong requests.
    assert f"this model's maximum context length is {most} tokens" in error["message"]


def test_a_prompt_above_the_context_is_refused_with_its_code(client):
    error = refused(client, "/v1/completions", {"prompt": "word " * 4000})
    assert error["code"] == "context_length_exceeded"
    error = refused(client, "/v1/completions", {"prompt": "word " * 4000, "stream": True})
    assert error["code"] == "context_length_exceeded"
