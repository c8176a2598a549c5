"""Routes that move in a conversation and prepare its next turn."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from lmchat.server.dialects.limits import check_counted
from lmchat.server.http.body import Body
from lmchat.server.http.json_answer import json_answer
from lmchat.server.http.parameters import Details, IdempotencyKey, Number
from lmchat.server.retries import keys
from lmchat.server.sessions import views
from lmchat.server.sessions.access import Opened, in_thread, location
from lmchat.server.sessions.bodies import (
    AnnotateBody,
    AppendBody,
    CountBody,
    EditReplyBody,
    ForkBody,
    PinBody,
    SessionRoute,
    SwitchBody,
)
from lmchat.server.state import owner_of, state_of

router = APIRouter(tags=["sessions"], route_class=SessionRoute)


class NoBody(Body):
    """The body of a request that needs none."""


@router.post("/v1/sessions/{session_id}/undo")
async def undo(session: Opened, body: NoBody | None = None) -> JSONResponse:
    """Removes the last user turn from the conversation and returns its text."""
    text = await in_thread(session.undo)
    return JSONResponse({"text": text, "revision": session.revision})


@router.get("/v1/sessions/{session_id}/branches")
async def branches(session: Opened, turn: Number, details: Details = False) -> JSONResponse:
    """Lists the branches at user turn `turn` (from 0), the oldest first."""
    found = await in_thread(lambda: views.of_branches(session.branches(turn), details=details))
    return await json_answer({"object": "list", "data": found})


@router.post("/v1/sessions/{session_id}/switch")
async def switch(session: Opened, body: SwitchBody) -> JSONResponse:
    """Switches to the newest conversation of branch `index` at user turn `turn`."""
    await in_thread(lambda: session.switch(body.turn, body.index))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/fork", status_code=201)
async def fork(
    request: Request, session: Opened, body: ForkBody | None = None, details: Details = False
) -> JSONResponse:
    """Creates a session with the first `at` turns (all), or up to the reply of id `after`."""
    state, owner = state_of(request), owner_of(request)
    wanted = body or ForkBody()

    def made() -> dict[str, Any]:
        with state.session_limit.room(owner):
            copy = session.fork(wanted.name, wanted.at, after=wanted.after, tags=wanted.tags)
        copy.fresh = False
        return views.whole(copy, details=details)

    found = await in_thread(made)
    return await json_answer(found, 201, location(request, found["id"]))


@router.post("/v1/sessions/{session_id}/warm", status_code=202)
async def warm(session: Opened, body: NoBody | None = None) -> JSONResponse:
    """Starts to load the session's KV before its next turn."""
    await in_thread(session.warm)
    return JSONResponse({"warming": True}, 202)


@router.post("/v1/sessions/{session_id}/pin")
async def pin(session: Opened, body: PinBody | None = None) -> JSONResponse:
    """Sets whether the session's KV stays longer than that of others."""
    pinned = body.pinned if body is not None else True
    await in_thread(lambda: session.pin(pinned))
    return JSONResponse({"pinned": pinned, "revision": session.revision})


@router.post("/v1/sessions/{session_id}/append")
async def append(session: Opened, body: AppendBody, key: IdempotencyKey = None) -> JSONResponse:
    """Appends messages, of users and assistants in turn, and generates nothing."""
    once = keys.once(key, "append", body.model_dump())
    await in_thread(lambda: session.append(body.messages, system=body.system, once=once))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/edit_reply")
async def edit_reply(
    session: Opened, body: EditReplyBody, key: IdempotencyKey = None
) -> JSONResponse:
    """Gives user turn `turn` (from 0) the reply `text`, as a new branch. Generates nothing."""
    once = keys.once(key, "edit_reply", body.model_dump())
    await in_thread(lambda: session.edit_reply(body.turn, body.text, once=once))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/annotate")
async def annotate(session: Opened, body: AnnotateBody) -> JSONResponse:
    """Replaces the metadata of the turn of id `turn`."""
    await in_thread(lambda: session.annotate(body.turn, body.metadata))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/count_tokens")
async def count_tokens(request: Request, session: Opened, body: CountBody) -> JSONResponse:
    """Returns the length of the prompt that `text` would make, in tokens."""
    check_counted(state_of(request).limits, body.text, body.before, body.system)
    count = await in_thread(
        lambda: session.count_tokens(
            body.text,
            template_variables=body.template_variables,
            after=body.after,
            before=body.before,
            system=body.system,
        )
    )
    return JSONResponse({"count": count})


@router.get("/v1/sessions/{session_id}/conversation")
async def conversation(session: Opened, reply: Number, details: Details = False) -> JSONResponse:
    """Lists the turns up to the reply of id `reply`, of any branch."""
    found = await in_thread(
        lambda: [views.of_turn(one, details=details) for one in session.conversation(reply)]
    )
    return await json_answer({"object": "list", "data": found})


@router.get("/v1/sessions/{session_id}/replies")
async def replies(session: Opened, details: Details = False) -> JSONResponse:
    """Lists the replies of all branches, the oldest first."""
    found = await in_thread(
        lambda: [views.of_turn(one, details=details) for one in session.replies]
    )
    return await json_answer({"object": "list", "data": found})
