"""Chat completions: bodies and events in OpenAI's types, and the values that they hold."""

import pytest
from http_server import RunningServer
from openai_bodies import chat, chat_stream, refused, stream

QUESTION = {"role": "user", "content": "My dog is called Waffles."}


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def text_of(chunks, index=0):
    parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in parts)


def test_an_answer_has_the_engines_reply(server, client):
    found = chat(client, model="memo", temperature=0)
    reply = server.call(server.engine.chat([QUESTION], temperature=0))
    assert found.choices[0].message.content == reply.text
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == len(reply.token_ids)
    assert found.usage.prompt_tokens == reply.usage.prompt_tokens
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_has_the_text_of_the_whole_answer(client):
    whole = chat(client, temperature=0)
    chunks = chat_stream(client, temperature=0)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_it_is_wanted(client):
    whole = chat(client, temperature=0)
    events = list(
        stream(
            client,
            "/v1/chat/completions",
            {"messages": [QUESTION], "temperature": 0, "stream_options": {"include_usage": True}},
        )
    )
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == whole.usage.completion_tokens
    assert events[-2]["usage"]["prompt_tokens"] == whole.usage.prompt_tokens


@pytest.mark.parametrize("include_usage", [True, False])
def test_the_last_object_of_a_stream_has_metrics(client, include_usage):
    options = {"include_usage": include_usage}
    chunks = chat_stream(client, stream_options=options, max_tokens=4)
    assert [chunk.model_extra.get("metrics") is not None for chunk in chunks] == [False] * (
        len(chunks) - 1
    ) + [True]
    assert set(chunks[-1].model_extra["metrics"]) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
        "tokens_per_second",
    }  # fmt: skip


def test_choices_of_a_stream_are_those_of_the_whole_answer(client):
    body = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 12}
    whole = chat(client, **body)
    chunks = chat_stream(client, **body)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert [text_of(chunks, i) for i in range(3)] == texts
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert [end.index for end in ends] == [0, 1, 2]
    assert [end.finish_reason for end in ends] == [c.finish_reason for c in whole.choices]


def test_usage_counts_the_prompt_once_and_all_choices(client):
    one = chat(client, max_tokens=3, ignore_eos=True)
    three = chat(client, n=3, max_tokens=3, ignore_eos=True)
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert (one.usage.completion_tokens, three.usage.completion_tokens) == (3, 9)


def test_logprobs_are_the_engines(server, client):
    body = {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    found = chat(client, **body).choices[0]
    reply = server.call(server.engine.chat([QUESTION], temperature=0, logprobs=3))
    entries = found.logprobs.content
    assert [entry.logprob for entry in entries] == [one.logprob for one in reply.logprobs]
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(entries)
    spelled = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert spelled == found.message.content + "<|end|>"
    assert "".join(entry.token for entry in entries) == spelled
    chunks = chat_stream(client, **body)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for part in parts if part for entry in part.content] == entries


def test_logprobs_of_a_stop_string_are_not_shown(client):
    body = {"temperature": 0, "logprobs": True, "stop": ["like"]}
    whole = chat(client, **body).choices[0]
    chunks = chat_stream(client, **body)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry for part in parts if part for entry in part.content] == whole.logprobs.content
    assert "like" not in text_of(chunks)
    assert whole.message.content == text_of(chunks)


def test_progress_has_the_cached_tokens(client):
    text = "Nothing else begins like this one. " * 40
    messages = [{"role": "user", "content": text}]
    first = reports(client, messages)
    assert first[-1]["processed"] == first[-1]["total"]
    assert first[0]["cache"] < 10  # the template's start
    again = reports(client, messages)
    assert 100 < again[0]["cache"] <= again[0]["processed"]
    usage = chat(client, messages=messages, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == reports(client, messages)[0]["cache"]
    assert not reports(client, messages, return_progress=False)


def reports(client, messages, **more):
    body = {"messages": messages, "max_tokens": 1, "return_progress": True, **more}
    events = list(stream(client, "/v1/chat/completions", body))
    return [e["prompt_progress"] for e in events if e != "[DONE]" and "prompt_progress" in e]


def test_the_id_ends_with_the_clients_request_id(client):
    assert chat(client, request_id="a-1", max_tokens=1).id == "chatcmpl-a-1"


def test_text_parts_are_one_text(client):
    def prompt(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return client.post("/tokenize", json=body).json()["tokens"]

    parts = [{"type": "text", "text": "My dog"}, {"type": "text", "text": "is old"}]
    assert prompt(parts) == prompt("My dog\nis old")


def test_a_developer_prompt_is_a_system_prompt(client):
    def usage(role):
        messages = [{"role": role, "content": "You are brief."}, QUESTION]
        return chat(client, messages=messages, temperature=0, max_tokens=5).choices[0].message

    assert usage("developer") == usage("system")


def test_reasoning_of_a_reply_may_come_under_either_name(client):
    for name in ("reasoning_content", "reasoning"):
        reply = {"role": "assistant", "content": "Yes.", name: "A thought."}
        chat(client, messages=[QUESTION, reply, QUESTION], max_tokens=1)


def test_a_final_message_is_continued(client):
    whole = chat(client, temperature=0)
    text = whole.choices[0].message.content
    start = {"role": "assistant", "content": text[:7]}
    body = {"messages": [QUESTION, start], "temperature": 0}
    found = chat(client, **body, continue_final_message=True, add_generation_prompt=False)
    assert found.choices[0].message.content == text[7:]
    assert refused(client, "/v1/chat/completions", body)["param"] == "messages[1].role"


def test_a_resent_history_computes_only_its_new_tokens(client):
    for limits in ({}, {"stop": ["character"]}, {"max_tokens": 5}):
        messages = [{"role": "user", "content": f"My dog is called Waffles. {limits}"}]
        first = chat(client, messages=messages, temperature=0, **limits)
        shown = first.choices[0].message
        messages += [
            shown.model_dump(),
            {"role": "user", "content": "What is my dog's name?"},
        ]
        second = chat(client, messages=messages, temperature=0)
        known = first.usage.prompt_tokens + first.usage.completion_tokens
        # The last token of a reply has no KV, as nothing followed it.
        assert second.usage.prompt_tokens_details.cached_tokens >= known - 1


def test_a_reply_of_the_server_can_be_sent_back_as_it_came(client):
    message = client.post("/v1/chat/completions", json={"messages": [QUESTION]}).json()
    sent = [QUESTION, {**message["choices"][0]["message"], "reasoning": "Hm.", "tool_calls": []}]
    assert chat(client, messages=[*sent, QUESTION]).choices


def test_special_tokens_are_spelled_on_request(client):
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    found = chat(client, **body, skip_special_tokens=False)
    assert "<|end|>" in found.choices[0].message.content
    assert "<|end|>" not in chat(client, **body).choices[0].message.content
    ended = chat(client, temperature=0, skip_special_tokens=False)
    assert (
        ended.choices[0].message.content == chat(client, temperature=0).choices[0].message.content
    )
