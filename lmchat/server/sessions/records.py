"""Routes that create, list, read, change and delete sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from lmchat.engine import ChatEngine
from lmchat.errors import NotFound
from lmchat.server.body import JsonRoute
from lmchat.server.errors import HttpError
from lmchat.server.sessions import views
from lmchat.server.sessions.access import in_thread, session_of
from lmchat.server.sessions.bodies import CreateBody, Properties
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.session import Session
from turbomind.shown import shown

router = APIRouter(tags=["sessions"], route_class=JsonRoute)

MOST_LISTED = 100


@router.post("/v1/sessions", status_code=201)
async def create(request: Request, body: CreateBody) -> JSONResponse:
    """Creates a session. A name that is taken is refused with 409, unless `open` is true."""
    state, owner = state_of(request), owner_of(request)
    body.check(state.limits)
    engine = state.engine.sync
    details = flag(request, "details")

    def make() -> dict[str, Any]:
        exists = body.name is not None and _exists(engine, owner, body.name)
        if exists and not body.open:
            raise HttpError(
                409, f"name is {shown(body.name)}, which is taken", param="name", code="name_taken"
            )
        if exists:
            return _opened(engine, owner, body, details, exists=True)
        with state.session_limit.room(owner):
            return _opened(engine, owner, body, details, exists=False)

    found = await in_thread(make)
    return JSONResponse(found, 201, {"Location": f"/v1/sessions/{found['id']}"})


def _opened(
    engine: ChatEngine, owner: str, body: CreateBody, details: bool, *, exists: bool
) -> dict[str, Any]:
    session = engine.session(
        body.name,
        owner=owner,
        system=body.system,
        history=body.history,
        settings=body.settings,
        template_variables=body.template_variables,
        overflow=body.overflow,
        metadata=body.metadata,
    )
    session.fresh = False  # it stays, also without a turn
    try:
        _change(session, Properties(title=body.title, tags=body.tags, pinned=body.pinned))
    except BaseException:
        if not exists:
            session.delete()
        raise
    return views.whole(session, details=details)


def _exists(engine: ChatEngine, owner: str, name: str) -> bool:
    try:
        engine.session_by_name(name, owner=owner)
    except NotFound:
        return False
    return True


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> JSONResponse:
    """Lists sessions, the last used first, in pages: `limit`, `after` (an id), `search`, `tag`.

    With `residence=true` each has its residence and predicted time to first token. With `name` the
    list has at most the session of that name, with `hidden=true` also those of the Responses API.
    """
    query, owner, engine = request.query_params, owner_of(request), state_of(request).engine.sync
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise HttpError(400, f"limit is {limit[:20]!r}, expected 1 to {MOST_LISTED}", param="limit")
    with_residence, hidden = flag(request, "residence"), flag(request, "hidden")

    def read() -> dict[str, Any]:
        if "name" in query:
            return _listed_by_name(engine, owner, query["name"])
        try:
            found = engine.sessions(
                owner,
                search=query.get("search"),
                tag=query.get("tag"),
                hidden=hidden,
                limit=int(limit) + 1,
                after=query.get("after"),
            )
        except NotFound:
            raise HttpError(400, "after is no session of the list", param="after") from None
        page = found[: int(limit)]
        forecasts: list[Any] = [None] * len(page)
        if with_residence:
            sessions = [engine.session_by_id(one.id, owner=owner) for one in page]
            forecasts = engine.forecasts(sessions)
        data = [views.listed(one, what) for one, what in zip(page, forecasts, strict=True)]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > len(page),
        }

    return JSONResponse(await in_thread(read))


def _listed_by_name(engine: ChatEngine, owner: str, name: str) -> dict[str, Any]:
    data = []
    with contextlib.suppress(NotFound):
        session = engine.session_by_name(name, owner=owner)
        data = [{"id": session.id, "object": "session", "name": session.name}]
    one = data[0]["id"] if data else None
    return {"object": "list", "data": data, "first_id": one, "last_id": one, "has_more": False}


def flag(request: Request, name: str) -> bool:
    """Returns a parameter of the query that is true or false; False if it is not given."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise HttpError(400, f"{name} is {given[:20]!r}, expected true or false", param=name)
    return given == "true"


def number(request: Request, name: str) -> int | None:
    """Returns a parameter of the query that is a number from 0; None if it is not given."""
    given = request.query_params.get(name)
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 9:
        raise HttpError(400, f"{name} is {given[:20]!r}, expected a number from 0", param=name)
    return int(given)


@router.get("/v1/sessions/{session_id}")
async def read(request: Request) -> Response:
    """Returns a session with the turns of its conversation.

    Its revision is the ETag. `residence=true` adds where its KV is, `token_ids=true` the tokens,
    `details=true` all else that is stored with the turns. With `state=true` the answer is the state
    alone. `refresh=true` first reads what other processes have stored. With `known=ID` it has only
    the turns after that one, if the conversation has it.
    """
    session = await session_of(request)
    engine = state_of(request).engine.sync
    with_residence, token_ids = flag(request, "residence"), flag(request, "token_ids")
    refreshed = flag(request, "refresh")
    if refreshed:
        await in_thread(session.refresh)
    if request.headers.get("if-none-match") == etag(session):
        return Response(status_code=304, headers={"ETag": etag(session)})

    if flag(request, "state"):
        return JSONResponse(
            {"id": session.id, "state": session.state.value, "revision": session.revision}
        )
    details = flag(request, "details")
    new_tokens, known = number(request, "new_tokens") or 32, number(request, "known")

    def made() -> dict[str, Any]:
        found = views.whole(session, token_ids=token_ids, details=details, known=known)
        if with_residence:
            found |= views.predicted(engine.forecasts([session], new_tokens)[0])
        return found

    found = await in_thread(made)
    return JSONResponse(found, headers={"ETag": f'"{found["revision"]}"'})


def etag(session: Session) -> str:
    """Returns the ETag of a session: its revision."""
    return f'"{session.revision}"'


@router.patch("/v1/sessions/{session_id}")
async def change(request: Request, body: Properties) -> JSONResponse:
    """Changes what the body has. A setting of null restores the model's.

    With `If-Match`, the session must have that revision, else the answer is 412.
    """
    session = await session_of(request)
    body.check(state_of(request).limits)
    expected, details = request.headers.get("if-match"), flag(request, "details")

    def check(revision: int) -> None:
        tags = [one.strip() for one in (expected or "*").split(",")]
        if "*" not in tags and f'"{revision}"' not in tags:
            raise HttpError(
                412, f"the revision is {revision}, expected {shown(expected)}", code="revision"
            )

    def made() -> dict[str, Any]:
        session.refresh()
        check(session.revision)
        _change(session, body, check)
        return views.whole(session, details=details)

    found = await in_thread(made)
    return JSONResponse(found, headers={"ETag": f'"{found["revision"]}"'})


def _change(session: Session, body: Properties, check: Callable[[int], None] | None = None) -> None:
    """Changes what the body has: first all that is one transaction and is checked first, then the
    name, the pages and the system prompt."""
    session.update(
        title=body.title,
        tags=body.tags,
        metadata=body.metadata,
        settings=body.settings,
        template_variables=body.template_variables,
        history=body.history,
        overflow=body.overflow,
        check=check,
    )
    if body.name is not None and body.name != session.name:
        session.rename(body.name)
    if body.pinned is not None and body.pinned != session.pinned:
        session.pin(body.pinned)
    if body.system is not None and body.system != (session.system or ""):
        session.set_system(body.system or None)


@router.delete("/v1/sessions/{session_id}")
async def delete(request: Request) -> JSONResponse:
    """Stops and deletes a session."""
    session = await session_of(request)
    session_id = session.id
    await in_thread(session.delete)
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})
