"""Routes that move in a conversation and prepare its next turn."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from lmchat.server.body import Body, JsonRoute
from lmchat.server.errors import HttpError
from lmchat.server.sessions import views
from lmchat.server.sessions.access import in_thread, session_of
from lmchat.server.sessions.bodies import ForkBody, PinBody, SwitchBody
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
    found = await in_thread(lambda: views.of_branches(session.branches(int(turn))))
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
    wanted = body or ForkBody()

    def made() -> dict[str, Any]:
        with state.session_limit.room(owner):
            copy = session.fork(wanted.name, wanted.at, after=wanted.after)
        copy.fresh = False
        return views.whole(copy)

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
