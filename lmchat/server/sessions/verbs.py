"""Routes that move in a conversation and prepare its next turn."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from lmchat.server.body import Body, JsonRoute
from lmchat.server.errors import HttpError
from lmchat.server.sessions import views
from lmchat.server.sessions.access import in_thread, session_of
from lmchat.server.sessions.bodies import (
    AnnotateBody,
    AppendBody,
    CountBody,
    ForkBody,
    PinBody,
    SwitchBody,
)
from lmchat.server.sessions.records import flag
from lmchat.server.state import owner_of, state_of

router = APIRouter(tags=["sessions"], route_class=JsonRoute)


class NoBody(Body):
    """The body of a request that needs none."""


@router.post("/v1/sessions/{session_id}/undo")
async def undo(request: Request, body: NoBody | None = None) -> JSONResponse:
    """Removes the last user turn from the conversation and returns its text."""
    session = await session_of(request)
    text = await in_thread(session.undo)
    return JSONResponse({"text": text, "revision": session.revision})


@router.get("/v1/sessions/{session_id}/branches")
async def branches(request: Request) -> JSONResponse:
    """Lists the branches at user turn `turn` (from 0), the oldest first."""
    session = await session_of(request)
    turn = request.query_params.get("turn", "")
    if not turn.isdecimal() or len(turn) > 9:
        raise HttpError(400, f"turn is {turn[:20]!r}, expected a number from 0", param="turn")
    details = flag(request, "details")
    found = await in_thread(lambda: views.of_branches(session.branches(int(turn)), details=details))
    return JSONResponse({"object": "list", "data": found})


@router.post("/v1/sessions/{session_id}/switch")
async def switch(request: Request, body: SwitchBody) -> JSONResponse:
    """Switches to the newest conversation of branch `index` at user turn `turn`."""
    session = await session_of(request)
    await in_thread(lambda: session.switch(body.turn, body.index))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/fork", status_code=201)
async def fork(request: Request, body: ForkBody | None = None) -> JSONResponse:
    """Creates a session with the first `at` turns (all), or up to the reply of id `after`."""
    session = await session_of(request)
    state, owner = state_of(request), owner_of(request)
    wanted, details = body or ForkBody(), flag(request, "details")

    def made() -> dict[str, Any]:
        with state.session_limit.room(owner):
            copy = session.fork(wanted.name, wanted.at, after=wanted.after, tags=wanted.tags)
        copy.fresh = False
        return views.whole(copy, details=details)

    found = await in_thread(made)
    return JSONResponse(found, 201, {"Location": f"/v1/sessions/{found['id']}"})


@router.post("/v1/sessions/{session_id}/warm", status_code=202)
async def warm(request: Request, body: NoBody | None = None) -> JSONResponse:
    """Starts to load the session's KV before its next turn."""
    session = await session_of(request)
    await in_thread(session.warm)
    return JSONResponse({"warming": True}, 202)


@router.post("/v1/sessions/{session_id}/pin")
async def pin(request: Request, body: PinBody | None = None) -> JSONResponse:
    """Sets whether the session's KV stays longer than that of others."""
    session = await session_of(request)
    pinned = body.pinned if body is not None else True
    await in_thread(lambda: session.pin(pinned))
    return JSONResponse({"pinned": pinned, "revision": session.revision})


@router.post("/v1/sessions/{session_id}/append")
async def append(request: Request, body: AppendBody) -> JSONResponse:
    """Appends messages, of users and assistants in turn, and generates nothing."""
    session = await session_of(request)
    await in_thread(lambda: session.append(body.messages, system=body.system))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/annotate")
async def annotate(request: Request, body: AnnotateBody) -> JSONResponse:
    """Replaces the metadata of the turn of id `turn`."""
    session = await session_of(request)
    await in_thread(lambda: session.annotate(body.turn, body.metadata))
    return JSONResponse({"revision": session.revision})


@router.post("/v1/sessions/{session_id}/count_tokens")
async def count_tokens(request: Request, body: CountBody) -> JSONResponse:
    """Returns the length of the prompt that `text` would make, in tokens."""
    session = await session_of(request)
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
async def conversation(request: Request) -> JSONResponse:
    """Lists the turns up to the reply of id `reply`, of any branch."""
    session, details = await session_of(request), flag(request, "details")
    reply = request.query_params.get("reply", "")
    if not reply.isdecimal() or len(reply) > 9:
        raise HttpError(400, f"reply is {reply[:20]!r}, expected the id of a reply", param="reply")
    found = await in_thread(
        lambda: [views.of_turn(one, details=details) for one in session.conversation(int(reply))]
    )
    return JSONResponse({"object": "list", "data": found})


@router.get("/v1/sessions/{session_id}/replies")
async def replies(request: Request) -> JSONResponse:
    """Lists the replies of all branches, the oldest first."""
    session, details = await session_of(request), flag(request, "details")
    found = await in_thread(
        lambda: [views.of_turn(one, details=details) for one in session.replies]
    )
    return JSONResponse({"object": "list", "data": found})
