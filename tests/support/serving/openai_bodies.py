"""Strict checks of OpenAI's objects, and events of streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

import httpx
import pydantic
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

Model = TypeVar("Model", bound=pydantic.BaseModel)

EXTRA = {"metrics", "prompt_progress", "reasoning_content"}
"""Fields of this server that OpenAI does not have."""


def strict(model: type[Model], data: Any) -> Model:
    """Returns `data` as an object of openai-python, whose fields it must have, and no others.

    openai-python itself accepts everything.
    """
    found = model.model_validate_json(json.dumps(data), strict=True)
    assert extra_fields(found) <= EXTRA
    return found


def extra_fields(value: Any) -> set[str]:
    """Returns names of fields that the type does not have, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        inner = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or ()).union(*map(extra_fields, inner))
    if isinstance(value, list):
        return set().union(*map(extra_fields, value))
    return set()


def chat(client: httpx.Client, **body: Any) -> ChatCompletion:
    """Returns the strictly checked answer of a chat completion."""
    body.setdefault("messages", [{"role": "user", "content": "My dog is called Waffles."}])
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return strict(ChatCompletion, answer.json())


def completion(client: httpx.Client, **body: Any) -> Completion:
    """Returns the strictly checked answer of a completion."""
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return strict(Completion, answer.json())


def chat_stream(client: httpx.Client, **body: Any) -> list[ChatCompletionChunk]:
    """Returns the strictly checked chunks of a streamed chat completion."""
    body.setdefault("messages", [{"role": "user", "content": "My dog is called Waffles."}])
    events = list(stream(client, "/v1/chat/completions", body))
    assert events.pop() == "[DONE]"
    return [strict(ChatCompletionChunk, event) for event in events]


def completion_stream(client: httpx.Client, **body: Any) -> list[Completion]:
    """Returns the strictly checked chunks of a streamed completion."""
    events = list(stream(client, "/v1/completions", body))
    assert events.pop() == "[DONE]"
    return [strict(Completion, _with_reason(event)) for event in events]


def _with_reason(event: dict[str, Any]) -> dict[str, Any]:
    """openai-python types each chunk of a completion as a whole one, which has a finish reason."""
    for choice in event["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return event


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yields the events of a stream, "[DONE]" as a text."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)


def refused(client: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Returns OpenAI's error object of a refused request."""
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 1000
    return error
