"""Reasoning of a model, beside its text."""

import pytest
from chat_models import CHATML, chat_model
from http_server import RunningServer
from openai_bodies import chat, chat_stream

THINKS = "{# </think> #}" + CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
BODY = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = chat_model(tmp_path_factory.mktemp("model") / "thinker", template=THINKS)
    with RunningServer(model=str(model)) as server:
        yield server.client()


def test_reasoning_has_a_field_of_its_own(client):
    found = chat(client, **BODY)
    message = found.choices[0].message
    assert message.model_extra["reasoning_content"]
    assert message.content == ""
    assert found.usage.completion_tokens_details.reasoning_tokens == 20


def test_reasoning_is_streamed_as_it_comes(client):
    whole = chat(client, **BODY).choices[0].message.model_extra["reasoning_content"]
    deltas = [chunk.choices[0].delta for chunk in chat_stream(client, **BODY)]
    parts = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
    assert len([part for part in parts if part]) > 3
    assert "".join(part or "" for part in parts) == whole
