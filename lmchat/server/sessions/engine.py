"""Routes for `lmchat.connect()`: what the engine is, and generation without a session.

Other programs use the OpenAI routes. These have all settings, the exact tokens, and the event
streams of sessions.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

import lmchat
from lmchat.aio.stream import AsyncFollower
from lmchat.generation.generation import Generation
from lmchat.generation.settings import as_json
from lmchat.public_text import public_model
from lmchat.server.config import Limits
from lmchat.server.dialects.limits import check_counted
from lmchat.server.errors import HttpError
from lmchat.server.http.body import Body, example
from lmchat.server.http.event_stream import Disconnected, EventStream, answered
from lmchat.server.http.json_answer import Json, json_answer
from lmchat.server.sessions import views
from lmchat.server.sessions.access import check_accepting, in_thread
from lmchat.server.sessions.bodies import Messages, SessionRoute, Variables, check_settings
from lmchat.server.sessions.stream import events
from lmchat.server.state import owner_of, state_of
from turbomind.shown import shown

router = APIRouter(prefix="/v1/engine", tags=["engine"], route_class=SessionRoute)

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20, fail_fast=True)
]


class EnginePromptBody(Body):
    """A prompt: a text or token ids, or messages."""

    model_config = example(prompt="Once upon a time")

    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    template_variables: Variables | None = None
    continue_final_message: bool = False

    def check_one(self) -> None:
        """Refuses both and neither of prompt and messages."""
        if (self.prompt is None) == (self.messages is None):
            raise HttpError(400, "expected one of prompt and messages", param="prompt")


class EngineGenerateBody(EnginePromptBody):
    """The body of `POST /v1/engine/generate`."""

    model_config = example(prompt="Once upon a time", settings={"max_new_tokens": 16})

    settings: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    token_ids: bool = False

    def check(self, limits: Limits) -> None:
        """Refuses settings that there are not, and those above the server's limits."""
        check_settings(self.settings, limits, stateless=True)


class EngineTokensBody(EnginePromptBody):
    """The body of `POST /v1/engine/tokens`."""

    model_config = example(messages=[{"role": "user", "content": "Hello!"}])

    add_generation_prompt: bool = True


class EngineStopBody(Body):
    """The body of `POST /v1/engine/stop`."""

    model_config = example(generation="0123456789abcdef0123456789abcdef")

    generation: str


class EngineTextsBody(Body):
    """The body of `POST /v1/engine/texts`."""

    model_config = example(token_ids=[5, 6, 7])

    token_ids: TokenIds


@router.get("")
async def engine(request: Request) -> JSONResponse:
    """Returns the engine's model, its formats, device, threads, context, template and settings, and
    the key's owner."""
    state = state_of(request)
    found = state.engine.sync
    return JSONResponse(
        {
            "object": "engine",
            "version": lmchat.__version__,
            "model": public_model(found.model),
            "owner": owner_of(request),
            "max_context": found.max_context,
            "vocab_size": found.core.vocab_size,
            "kv_bytes_per_token": found.info.kv_bytes_per_token,
            "kv_dtype": found.info.kv_dtype,
            "weights_text": found.info.weights_text,
            "device": found.device,
            "threads": found.threads,
            "model_settings": as_json(found.model_settings),
            "template": asdict(found.template_info),
        }
    )


@router.get("/stats")
async def stats(request: Request) -> JSONResponse:
    """Returns the engine's counters, those of its queue, and the sessions by state."""
    found = state_of(request).engine.sync
    counters = await in_thread(found.stats)
    return JSONResponse(
        {
            "engine": asdict(counters),
            "queue": asdict(found.queue_stats()),
            "sessions": {state.value: count for state, count in found.session_states().items()},
        }
    )


@router.post("/generate")
async def generate(request: Request, body: EngineGenerateBody) -> Response:
    """Generates a reply to a prompt or to messages. A disconnect ends it."""
    check_accepting(request)
    body.check_one()
    body.check(state_of(request).limits)
    found, owner = state_of(request).engine.sync, owner_of(request)

    def start() -> Generation:
        if body.messages is None:
            assert body.prompt is not None
            return found.start_generate(body.prompt, owner=owner, **body.settings)
        return found.start_chat(
            body.messages,
            owner=owner,
            template_variables=body.template_variables,
            continue_final_message=body.continue_final_message,
            **body.settings,
        )

    generation = await in_thread(start)
    number = uuid.uuid4().hex
    _running(request)[owner, number] = generation
    follower = AsyncFollower(generation.follow())
    if body.stream:
        return EventStream.of(request, _owning(follower, generation, number, body.token_ids))
    try:
        reply = await answered(request, follower.result())
    except Disconnected:
        generation.cancel()
        raise
    finally:
        follower.close()
    return await in_thread(lambda: Json(views.of_reply(reply, token_ids=body.token_ids)))


async def _owning(
    follower: AsyncFollower, generation: Generation, number: str, token_ids: bool
) -> AsyncIterator[bytes]:
    try:
        async for one in events(follower, None, token_ids=token_ids, generation=number):
            yield one
    finally:
        generation.cancel()


class _Running(weakref.WeakValueDictionary[tuple[str, str], Generation]):
    """The generations without sessions, by owner and id."""


def _running(request: Request) -> _Running:
    return state_of(request).part(_Running)


@router.post("/stop")
async def stop(request: Request, body: EngineStopBody) -> JSONResponse:
    """Stops the generation of this id, whose stream then ends with what it has."""
    generation = _running(request).get((owner_of(request), body.generation))
    if generation is None:
        raise HttpError(404, f"no generation {shown(body.generation)}", code="not_found")
    generation.cancel()
    return JSONResponse({"stopped": True})


@router.post("/score")
async def score(request: Request, body: EnginePromptBody) -> JSONResponse:
    """Returns the log-probability of each token of `prompt` after the first."""
    if body.prompt is None:
        raise HttpError(400, "prompt is missing", param="prompt", code="missing_field")
    engine, owner = state_of(request).engine, owner_of(request)
    scores = await answered(request, engine.score(body.prompt, owner=owner))
    return await json_answer({"logprobs": scores})


@router.post("/tokens")
async def tokens(request: Request, body: EngineTokensBody) -> JSONResponse:
    """Returns the tokens of a text or of messages, as a generation would compute them."""
    body.check_one()
    check_counted(state_of(request).limits, body.prompt, body.messages)
    found, owner = state_of(request).engine.sync, owner_of(request)

    def ids() -> list[int]:
        if body.messages is None:
            return found.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else []
        return found.chat_token_ids(
            body.messages,
            owner=owner,
            template_variables=body.template_variables,
            continue_final_message=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
        )

    return await json_answer({"token_ids": await in_thread(ids)})


@router.post("/texts")
async def texts(request: Request, body: EngineTextsBody) -> JSONResponse:
    """Returns the text of tokens, special ones spelled out, and that of each token."""
    found = state_of(request).engine.sync
    for i, token in enumerate(body.token_ids):
        if token >= found.core.vocab_size:
            raise HttpError(
                400,
                f"token_ids[{i}] is {token}, expected a token id below {found.core.vocab_size}",
                param="token_ids",
            )

    def made() -> dict[str, Any]:
        tokenizer, ids = found.tokenizer, body.token_ids
        return {"text": tokenizer.raw(ids), "pieces": tokenizer.pieces(ids)}

    return await json_answer(await in_thread(made))
