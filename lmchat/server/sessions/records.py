"""Routes that create, list, read, change and delete sessions."""

from __future__ import annotations

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
    """Creates a session. A name that is taken is refused with 409."""
    state, owner = state_of(request), owner_of(request)
    body.check(state.limits)
    engine = state.engine.sync

    def make() -> dict[str, Any]:
        with state.session_limit.room(owner):
            return _created(engine, owner, body)

    found = await in_thread(make)
    return JSONResponse(found, 201, {"Location": f"/v1/sessions/{found['id']}"})


def _created(engine: ChatEngine, owner: str, body: CreateBody) -> dict[str, Any]:
    if body.name is not None:
        try:
            engine.session_by_name(body.name, owner=owner)
        except NotFound:
            pass
        else:
            raise HttpError(
                409, f"name is {shown(body.name)}, which is taken", param="name", code="name_taken"
            )
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
        session.delete()
        raise
    return views.whole(session)


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> JSONResponse:
    """Lists sessions, the last used first, in pages: `limit`, `after` (an id), `search`, `tag`.

    With `residence=true` each has its residence and predicted time to first token.
    """
    query, owner, engine = request.query_params, owner_of(request), state_of(request).engine.sync
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise HttpError(400, f"limit is {limit[:20]!r}, expected 1 to {MOST_LISTED}", param="limit")
    with_residence = flag(request, "residence")

    def read() -> dict[str, Any]:
        try:
            found = engine.sessions(
                owner,
                search=query.get("search"),
                tag=query.get("tag"),
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


def flag(request: Request, name: str) -> bool:
    """Returns a parameter of the query that is true or false; False if it is not given."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise HttpError(400, f"{name} is {given[:20]!r}, expected true or false", param=name)
    return given == "true"


@router.get("/v1/sessions/{session_id}")
async def read(request: Request) -> Response:
    """Returns a session with the turns of its conversation.

    Its revision is the ETag. `residence=true` adds where its KV is, `token_ids=true` the tokens.
    """
    session = await session_of(request)
    engine = state_of(request).engine.sync
    with_residence, token_ids = flag(request, "residence"), flag(request, "token_ids")
    if request.headers.get("if-none-match") == etag(session):
        return Response(status_code=304, headers={"ETag": etag(session)})

    def made() -> dict[str, Any]:
        found = views.whole(session, token_ids=token_ids)
        if with_residence:
            found |= views.predicted(engine.forecasts([session])[0])
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
    expected = request.headers.get("if-match")

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
        return views.whole(session)

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
