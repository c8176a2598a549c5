"""The clients that people use: openai-python, LangChain, and the requests of vLLM's benchmark."""

import asyncio

import openai
import pytest
from http_server import RunningServer
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai_bodies import strict

MESSAGES = [{"role": "user", "content": "My dog is called Waffles."}]


@pytest.fixture(scope="module")
def server():
    with RunningServer() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_openai_chat(client):
    found = client.chat.completions.create(model="memo", messages=MESSAGES, temperature=0)
    strict(type(found), found.model_dump())
    chunks = list(
        client.chat.completions.create(
            model="memo",
            messages=MESSAGES,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == found.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == found.usage.completion_tokens


def test_openai_stream_helper(client):
    with client.chat.completions.stream(model="memo", messages=MESSAGES, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    whole = client.chat.completions.create(model="memo", messages=MESSAGES, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_openai_completions(client):
    found = client.completions.create(model="memo", prompt="My dog", max_tokens=5)
    chunks = client.completions.create(model="memo", prompt="My dog", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["memo"]
    assert client.models.retrieve("memo").id == "memo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="memo",
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_field")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_openai_asyncio(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(model="memo", messages=MESSAGES, temperature=0)
                for _ in range(8)
            ]
            return await asyncio.gather(*asked)

    assert len({found.choices[0].message.content for found in asyncio.run(ask())}) == 1


def test_langchain(server):
    model = ChatOpenAI(
        model="memo",
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        stream_usage=True,
    )
    messages = [
        SystemMessage("You are brief."),
        HumanMessage("My dog is called Waffles."),
        AIMessage("A good name."),
        HumanMessage("What is my dog's name?"),
    ]
    found = model.invoke(messages)
    chunks = list(model.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == found.content
    assert found.usage_metadata["output_tokens"] > 0
    assert (
        sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks)
        == (found.usage_metadata["output_tokens"])
    )
    assert found.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {
                "model": "memo", "prompt": "My dog", "temperature": 0.0, "repetition_penalty": 1.0,
                "max_tokens": 5, "logprobs": None, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "/v1/chat/completions",
            {
                "model": "memo", "temperature": 0.0, "max_completion_tokens": 5, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True,
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "My dog is old."}]}
                ],
            },
        ),
    ],
)  # fmt: skip
def test_requests_of_vllms_benchmark(server, path, body):
    with server.client().stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"completion_tokens":5' in lines[-2]
