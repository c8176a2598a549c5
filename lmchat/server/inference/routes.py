"""Routes of `/v2`: health, metadata, `infer`, `generate` and `generate_stream`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from lmchat.aio.stream import AsyncReplyStream
from lmchat.errors import Error, InvalidRequest
from lmchat.generation.generation import Delta, Reply
from lmchat.server.errors import HttpError, error_object, named, refusal
from lmchat.server.http.event_stream import EventStream, answered, event
from lmchat.server.http.guard import shutting_down
from lmchat.server.http.json_body import parsed
from lmchat.server.inference import metadata, tensors
from lmchat.server.inference.prompt_settings import PromptRequest, prompt_request
from lmchat.server.state import ServerState, owner_of, state_of
from turbomind.shown import shown

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_PARAMETERS_FIRST = ("id", "parameters")


router = APIRouter(tags=["Open Inference Protocol"])


async def _check_model(request: Request, model: str) -> None:
    """Refuses the name of another model."""
    await _check_version(request, model, metadata.VERSION)


async def _check_version(request: Request, model: str, version: str) -> None:
    """Refuses the name of another model, and another version of it."""
    name = state_of(request).model_name
    if model != name or version != metadata.VERSION:
        raise HttpError(404, f"unknown model or version, expected {name!r} {metadata.VERSION}")


_PATH = "/v2/models/{model}"
_PATHS: dict[str, Callable[..., Any]] = {
    _PATH: _check_model,
    _PATH + "/versions/{version}": _check_version,
}


def _of_model(method: str, ending: str = "", **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Adds a route below the path of the model, and below that of its version."""

    def add(endpoint: Endpoint) -> Endpoint:
        for path, check in _PATHS.items():
            router.add_api_route(
                path + ending, endpoint, methods=[method], dependencies=[Depends(check)], **options
            )
        return endpoint

    return add


@router.get("/v2/health/live")
async def live() -> JSONResponse:
    """Returns 200 while the process answers."""
    return JSONResponse({})


@router.get("/v2/health/ready")
async def server_ready(request: Request) -> JSONResponse:
    """Returns 200 while new requests are accepted."""
    _check_accepting(state_of(request))
    return JSONResponse({})


@router.get("/v2")
async def server_metadata() -> JSONResponse:
    """Returns the server's name, version and extensions."""
    return JSONResponse(metadata.server())


@_of_model("GET")
async def model_metadata(request: Request) -> JSONResponse:
    """Returns the model's inputs and outputs."""
    return JSONResponse(metadata.model(state_of(request).model_name))


@_of_model("GET", "/ready")
async def model_ready(request: Request) -> JSONResponse:
    """Returns 200 while the model takes requests."""
    _check_accepting(state_of(request))
    return JSONResponse({})


@_of_model("GET", "/config")
async def model_config(request: Request) -> JSONResponse:
    """Returns the model's configuration in Triton's form."""
    batch = state_of(request).engine.sync.core.max_batch_size
    return JSONResponse(metadata.config(state_of(request).model_name, batch))


@_of_model("POST", "/infer", openapi_extra=metadata.INFER)
async def infer(request: Request) -> Response:
    """Continues each text of `text_input`. Tensors are JSON or bytes after the JSON."""
    state = state_of(request)
    state.engine.check_capacity(owner_of(request))
    header = request.headers.get(tensors.HEADER_LENGTH)
    given = await tensors.parse(await request.body(), header, state.limits.prompts)
    wanted = prompt_request(given.inputs, given.parameters, state.limits)
    if wanted.stream:
        raise HttpError(400, "stream is true, expected false; use generate_stream", param="stream")
    requested = _requested(given, wanted)
    if any(one.name == "cumulative_logprob" for one in requested):
        wanted.settings["logprobs"] = 0
    with _named(wanted):
        replies = await answered(request, _replies(state, owner_of(request), wanted))
    columns = _outputs(wanted, replies)
    head = {"model_name": state_of(request).model_name, "model_version": metadata.VERSION}
    if given.id:
        head["id"] = given.id
    body, length = tensors.encode(
        [
            (one.name, metadata.OUTPUTS[one.name], columns[one.name], one.is_binary)
            for one in requested
        ],
        head,
    )
    if length is None:
        return Response(body, media_type="application/json")
    return Response(
        body,
        media_type="application/octet-stream",
        headers={tensors.HEADER_LENGTH: str(length)},
    )


@_of_model("POST", "/generate", openapi_extra=metadata.GENERATE)
async def generate(request: Request) -> JSONResponse:
    """Continues one text. Settings are in `parameters` or beside `text_input`."""
    state = state_of(request)
    state.engine.check_capacity(owner_of(request))
    head, wanted = await _generate_request(request)
    if wanted.stream:
        raise HttpError(400, "stream is true, expected false; use generate_stream", param="stream")
    with _named(wanted):
        replies = await answered(request, _replies(state, owner_of(request), wanted))
    columns = _outputs(wanted, replies)
    return JSONResponse(
        {**head, **{one: columns[one][0] for one in ("text_output", *wanted.extra)}}
    )


@_of_model("POST", "/generate_stream", openapi_extra=metadata.GENERATE)
async def generate_stream(request: Request) -> EventStream:
    """Continues one text as server-sent events, each with the next part of `text_output`."""
    state = state_of(request)
    state.engine.check_capacity(owner_of(request))
    head, wanted = await _generate_request(request, stream=True)
    stream = state.engine.stream(wanted.prompts[0], owner=owner_of(request), **wanted.settings)
    with _named(wanted):
        await _begun(request, stream)
    return EventStream.of(request, _events(head, wanted, stream))


@contextlib.contextmanager
def _named(wanted: PromptRequest) -> Iterator[None]:
    """Raises refusals with the client's names of settings."""
    try:
        yield
    except InvalidRequest as error:
        raise named(error, wanted.fields) from error


async def _generate_request(
    request: Request, stream: bool = False
) -> tuple[dict[str, Any], PromptRequest]:
    """Returns the fields that every response repeats, and the request."""
    given = await parsed(await request.body())
    if not isinstance(given, dict):
        raise HttpError(400, "the body is not a JSON object, expected one with 'text_input'")
    nested = given.get("parameters") or {}
    if not isinstance(nested, dict):
        raise refusal("parameters", shown(nested), "an object")
    text = given.get("text_input")
    text = text[0] if isinstance(text, list) and len(text) == 1 else text
    if not isinstance(text, str):
        raise HttpError(400, "text_input is missing, expected a string", param="text_input")
    beside = {k: v for k, v in given.items() if k not in ("text_input", *_PARAMETERS_FIRST)}
    parameters = {**nested, **beside}
    inputs: dict[str, list[Any]] = {"text_input": [text]}
    sampling = parameters.pop("sampling_parameters", None)
    if sampling is not None:
        inputs["sampling_parameters"] = [sampling]
    if stream and parameters.setdefault("stream", True) is False:
        raise HttpError(400, "stream is false, expected true; use generate", param="stream")
    head: dict[str, Any] = {
        "model_name": state_of(request).model_name,
        "model_version": metadata.VERSION,
    }
    if given.get("id"):
        head["id"] = str(given["id"])[:256]
    return head, prompt_request(inputs, parameters, state_of(request).limits)


async def _replies(state: ServerState, owner: str, wanted: PromptRequest) -> list[Reply]:
    """Generates all prompts at once. If one fails, the others are cancelled."""
    tasks = [
        asyncio.ensure_future(state.engine.generate(prompt, owner=owner, **wanted.settings))
        for prompt in wanted.prompts
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _begun(request: Request, stream: AsyncReplyStream) -> None:
    """Waits until the generation has started, so that a refusal has its own status."""
    try:
        await stream.__aenter__()
    except BaseException:
        await stream.aclose()
        raise


async def _events(
    head: dict[str, Any], wanted: PromptRequest, stream: AsyncReplyStream
) -> AsyncIterator[bytes]:
    try:
        async for part in stream.events():
            if isinstance(part, Delta) and part.text:
                yield event(json.dumps({**head, "text_output": part.text}))
        if wanted.extra and stream.reply is not None:
            columns = _outputs(wanted, [stream.reply])
            last = {one: columns[one][0] for one in wanted.extra}
            yield event(json.dumps({**head, "text_output": "", **last}))
    except Error as error:
        message = error_object(named(error, wanted.fields))["error"]["message"]
        yield event(json.dumps({**head, "error": message}))
    finally:
        with contextlib.suppress(Error):
            await stream.aclose()


def _outputs(wanted: PromptRequest, replies: list[Reply]) -> dict[str, list[Any]]:
    """Returns the values of all outputs, one per prompt."""
    prompts = wanted.prompts if wanted.with_prompt else ("",) * len(replies)
    return {
        "text_output": [
            prompt + reply.text for prompt, reply in zip(prompts, replies, strict=True)
        ],
        "finish_reason": [reply.finish_reason for reply in replies],
        "cumulative_logprob": [sum(one.logprob for one in reply.logprobs) for reply in replies],
        "num_input_tokens": [reply.usage.prompt_tokens for reply in replies],
        "num_output_tokens": [reply.usage.completion_tokens for reply in replies],
    }


def _requested(given: tensors.InferRequest, wanted: PromptRequest) -> tuple[tensors.Requested, ...]:
    if given.outputs is None:
        names = ("text_output", *wanted.extra)
        return tuple(tensors.Requested(name, given.is_binary) for name in names)
    for one in given.outputs:
        if one.name not in metadata.OUTPUTS:
            expected = ", ".join(metadata.OUTPUTS)
            raise HttpError(400, f"unknown output {one.name[:100]!r}, expected one of {expected}")
    return given.outputs


def _check_accepting(state: ServerState) -> None:
    if state.draining:
        raise shutting_down()
