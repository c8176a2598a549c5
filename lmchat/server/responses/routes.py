"""Routes of `/v1/responses`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from lmchat.aio.threads import shared
from lmchat.generation.generation import Generation
from lmchat.generation.reply import Reply
from lmchat.server.dialects.limits import check_counted
from lmchat.server.dialects.messages import template_variables
from lmchat.server.dialects.models import check_model
from lmchat.server.errors import HttpError, in_field
from lmchat.server.http.body import JsonRoute
from lmchat.server.http.event_stream import Disconnected, EventStream, answered
from lmchat.server.http.parameters import IdempotencyKey
from lmchat.server.responses import ids, items
from lmchat.server.responses.begin import (
    Beginner,
    count_input,
    find,
    in_progress,
    record_of,
    response_turns,
    unstored_messages,
)
from lmchat.server.responses.body import FIELDS, PromptBody, ResponseBody
from lmchat.server.responses.items import Input
from lmchat.server.responses.objects import RECORD, response_object, stored_response
from lmchat.server.responses.run import Run, Runs
from lmchat.server.retries.door import open_door
from lmchat.server.retries.entries import Entries
from lmchat.server.retries.entry import Entry
from lmchat.server.retries.receipt import Receipt
from lmchat.server.state import ServerState, owner_of, state_of
from lmchat.store.turns import Turn


class ResponseRoute(JsonRoute):
    """A route whose refusals have the names of the Responses API."""

    FIELDS: ClassVar[Mapping[str, str]] = FIELDS


router = APIRouter(tags=["OpenAI Responses"], route_class=ResponseRoute)


class Responses:
    """What the routes of this dialect share: running responses, and how new ones begin."""

    def __init__(self, state: ServerState) -> None:
        self.runs = Runs()
        self.beginner = Beginner(state.engine.sync, state.session_limit)


def responses_of(request: Request) -> Responses:
    """Returns the dialect's part of the server's state."""
    state = state_of(request)
    return state.part(Responses, lambda: Responses(state))


@router.post("/v1/responses")
async def create(request: Request, body: ResponseBody, key: IdempotencyKey = None) -> Response:
    """Generates a response, stored unless `store` is false. An `Idempotency-Key` names a stored
    one."""
    state, owner = state_of(request), owner_of(request)
    check_model(state, body.model)
    body.check(state.limits)
    given = items.parse(body.input, state.limits.messages)
    if body.store:
        return await _stored(request, owner, body, given, key)
    live = body.previous_response_id is not None
    state.engine.check_capacity(owner, live=live)  # before anything is written
    run = await _unstored_run(request, owner, body, given)
    if body.stream:
        assert run.log is not None
        return EventStream.of(request, _events(run, run.log.read()))
    try:
        return _json(await answered(request, run.result()))
    except Disconnected:
        run.cancel()
        raise


async def _stored(
    request: Request, owner: str, body: ResponseBody, given: Input, key: str | None
) -> Response:
    """Answers with a stored response: a new one, or that of an equal request."""
    responses, state = responses_of(request), state_of(request)
    drops: list[Callable[[], None]] = []
    door = await shared.run(responses.beginner.door, owner, body, given, key, drops)
    entry = await open_door(state.part(Entries), door)
    try:
        run = await _stored_run(request, owner, body, entry, drops)
        if body.stream:
            assert run.log is not None
            return Receipt(EventStream.of(request, run.log.read()), entry)
        if body.background:
            return Receipt(_json(run.response), entry, has_reply=False)
        return Receipt(_json(await answered(request, run.result())), entry)
    except BaseException:
        entry.leave()
        raise


async def _stored_run(
    request: Request,
    owner: str,
    body: ResponseBody,
    entry: Entry,
    drops: Sequence[Callable[[], None]],
) -> Run:
    state, session, answer = state_of(request), entry.session, entry.answer
    assert session is not None
    assert answer is not None
    turn, session_id = answer.turn_id, session.id
    assert turn is not None
    runs, response_id = responses_of(request).runs, ids.of_turn("resp", session_id, turn)
    with_events = body.stream or body.background
    known = runs.find(response_id, owner)
    if known is not None and with_events:
        return known
    run = Run(
        answer,
        response_id,
        lambda kind: ids.of_turn(kind, session_id, turn),
        owner=owner,
        model=state.model_name,
        record=await shared.run(record_of, entry),
        conversation=ids.of_conversation(session_id) if body.conversation else None,
        tokenizer=state.engine.tokenizer if body.has_logprobs else None,
        with_events=with_events,
        drop_empty=drops[-1] if drops else None,
        whole=entry.whole,
    )
    if with_events:
        runs.add(run)
    return run


async def _unstored_run(request: Request, owner: str, body: ResponseBody, given: Input) -> Run:
    """Starts a response that is not stored, after an earlier one or without."""
    state = state_of(request)
    engine = state.engine.sync

    def start() -> Generation:
        turns: Sequence[Turn] = ()
        if body.previous_response_id is not None:
            with in_field("previous_response_id"):
                turns = response_turns(engine, owner, body.previous_response_id)[0]
        return engine.start_chat(
            unstored_messages(body, given, turns),
            owner=owner,
            template_variables=body.chat_template_kwargs,
            **body.settings(),
        )

    generation = await shared.run(start)
    return Run(
        generation,
        ids.unstored("resp"),
        functools.partial(_unstored_item, ids.unstored("")),
        owner=owner,
        model=state.model_name,
        record={"created_at": int(time.time()), **body.echo()},
        conversation=None,
        tokenizer=state.engine.tokenizer if body.has_logprobs else None,
        with_events=body.stream,
    )


def _unstored_item(suffix: str, kind: str) -> str:
    return f"{kind}{suffix}"


async def _events(run: Run, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the events of a run, which ends with its reader."""
    try:
        async for one in events:
            yield one
    finally:
        run.cancel()


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request, body: PromptBody) -> JSONResponse:
    """Counts the tokens of a prompt, and generates nothing."""
    state, owner = state_of(request), owner_of(request)
    check_model(state, body.model)
    template_variables(body.chat_template_kwargs)
    check_counted(state.limits, body.input, body.instructions)
    given = items.parse(body.input, state.limits.messages)
    found = await shared.run(count_input, state.engine.sync, owner, body, given)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": found})


@router.get("/v1/responses/{response_id}")
async def retrieve(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, lt=10**12)] = -1,
) -> Response:
    """Returns a response, or its events: with `stream=true`, those after `starting_after`."""
    owner = owner_of(request)
    run = responses_of(request).runs.find(response_id, owner)
    if stream:
        return await _resumed(request, run, response_id, starting_after)
    if run is not None and not run.is_stored:
        return _json(run.response)
    if (elsewhere := await _elsewhere(request, response_id)) is not None:
        return JSONResponse(elsewhere)
    turns, session_id = await _turns(request, response_id)
    return JSONResponse(stored_response(session_id, state_of(request).model_name, turns))


async def _resumed(request: Request, run: Run | None, response_id: str, after: int) -> EventStream:
    if run is None or run.log is None:
        await _turns(request, response_id)  # an absent response is not found
        raise HttpError(
            400,
            "the response has no events, expected one made in the background in the last minutes",
            param="stream",
        )
    return EventStream.of(request, run.log.read(after + 1))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Stops a background response. What it has is kept."""
    run = responses_of(request).runs.find(response_id, owner_of(request))
    if run is None:
        if (elsewhere := await _elsewhere(request, response_id)) is not None:
            if not elsewhere["background"]:
                raise _not_background()
            reply = await _stopped(request, response_id)
            if reply is not None and reply.turn is None:
                return JSONResponse({**elsewhere, "status": "cancelled"})
        turns, session_id = await _turns(request, response_id)
        record = turns[-2].metadata.get(RECORD) or {}
        if not record.get("background"):
            raise _not_background()
        return JSONResponse(stored_response(session_id, state_of(request).model_name, turns))
    if not run.record.get("background"):
        raise _not_background()
    await _stop(request, run)
    return _json(await answered(request, run.wait()))


def _json(encoded: str) -> Response:
    return Response(encoded, media_type="application/json")


def _not_background() -> HttpError:
    return HttpError(400, "the response is not in the background: only such can be cancelled")


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> JSONResponse:
    """Deletes a response. Its turn stays in the conversation of later ones.

    The session of responses is deleted with the last of them. A running response is stopped.
    """
    owner = owner_of(request)
    responses = responses_of(request)
    run = responses.runs.find(response_id, owner)
    is_stored = True
    if run is not None:
        await _stop(request, run)
        await run.wait()
        responses.runs.remove(response_id)
        is_stored = run.is_stored
    elif await _elsewhere(request, response_id) is not None:
        reply = await _stopped(request, response_id)
        is_stored = reply is None or reply.turn is not None
    if is_stored:
        await shared.run(responses.beginner.delete, owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    request: Request, response_id: str, page: Annotated[items.Page, Query()]
) -> JSONResponse:
    """Lists what a response has answered: the items of its conversation before it."""
    turns, session_id = await _turns(request, response_id)
    found = await shared.run(items.of_turns, session_id, turns[:-1])
    return JSONResponse(items.page(page, found))


@router.post("/v1/responses/compact")
async def compact() -> None:
    """Refuses compaction, which OpenAI's server offers."""
    raise HttpError(404, "compact is not supported; truncation 'auto' drops the oldest turns")


async def _elsewhere(request: Request, response_id: str) -> dict[str, Any] | None:
    """Returns a response that another process generates now, or None."""
    session_id, turn = ids.turn_of("resp", response_id)
    engine, model = state_of(request).engine.sync, state_of(request).model_name
    session = await shared.run(find, engine, owner_of(request), session_id, "resp", response_id)
    record = await shared.run(in_progress, session, turn)
    if record is None:
        return None
    conversation = ids.of_conversation(session_id) if record.get("conversation") else None
    return response_object(
        response_id, model, record, status="in_progress", conversation=conversation
    )


async def _stop(request: Request, run: Run) -> None:
    """Stops a response for a client that asks for it, so that nobody is owed the rest."""
    with contextlib.suppress(HttpError):  # it was cancelled before, and its session is deleted
        await _stopped(request, run.id)
    run.cancel()


async def _stopped(request: Request, response_id: str) -> Reply | None:
    """Stops a response that any process generates. Returns its reply; None: it has ended."""
    session_id, turn = ids.turn_of("resp", response_id)
    engine = state_of(request).engine.sync
    session = await shared.run(find, engine, owner_of(request), session_id, "resp", response_id)
    return await shared.run(session.stop, turn)


async def _turns(request: Request, response_id: str) -> tuple[tuple[Turn, ...], str]:
    """Returns the turns up to a stored response, and its session's id."""
    engine = state_of(request).engine.sync
    return await shared.run(response_turns, engine, owner_of(request), response_id)
