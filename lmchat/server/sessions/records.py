"""Routes that create, list, read, change and delete sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from lmchat.engine import ChatEngine
from lmchat.errors import NotFound
from lmchat.interface.session import PROPERTIES
from lmchat.server.errors import HttpError
from lmchat.server.forecasts import forecasts_by_id
from lmchat.server.http.json_answer import json_answer
from lmchat.server.http.parameters import Details, Number, Text, TokenIds
from lmchat.server.sessions import views
from lmchat.server.sessions.access import Opened, in_thread, location
from lmchat.server.sessions.bodies import CreateBody, Properties, SessionRoute
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.session import Session
from turbomind.shown import shown

router = APIRouter(tags=["sessions"], route_class=SessionRoute)

MOST_LISTED = 100


@router.post("/v1/sessions", status_code=201)
async def create(request: Request, body: CreateBody, details: Details = False) -> JSONResponse:
    """Creates a session. A name that is taken is refused with 409, unless `open` is true."""
    state, owner = state_of(request), owner_of(request)
    body.check(state.limits)
    engine = state.engine.sync

    def make() -> dict[str, Any]:
        if body.name is None:
            with state.session_limit.room(owner):
                return _opened(engine, owner, body, details, exists=False)
        with state.names.holding((owner, body.name)):
            if _exists(engine, owner, body.name):
                return _opened(engine, owner, body, details, exists=True)
            with state.session_limit.room(owner):
                return _opened(engine, owner, body, details, exists=False)

    found = await in_thread(make)
    return await json_answer(found, 201, location(request, found["id"]))


def _opened(
    engine: ChatEngine, owner: str, body: CreateBody, details: bool, *, exists: bool
) -> dict[str, Any]:
    """Opens or creates a session. A new one is deleted if it cannot be as the body wants it."""
    if exists and not body.open:
        raise _taken(body.name)
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
    is_new = session.fresh and not exists
    session.fresh = False  # it stays, also without a turn
    if not (is_new or body.open):  # another process was faster
        raise _taken(body.name)
    try:
        _change(session, Properties(title=body.title, tags=body.tags, pinned=body.pinned))
    except BaseException:
        if is_new:
            session.delete()
        raise
    return views.whole(session, details=details)


def _taken(name: str | None) -> HttpError:
    return HttpError(409, f"name is {shown(name)}, which is taken", param="name", code="name_taken")


def _exists(engine: ChatEngine, owner: str, name: str) -> bool:
    try:
        engine.session_by_name(name, owner=owner)
    except NotFound:
        return False
    return True


@router.get("/v1/sessions")
async def list_sessions(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20,
    after: Text = None,
    search: Text = None,
    tag: Text = None,
    name: Text = None,
    residence: bool = False,
    hidden: bool = False,
) -> JSONResponse:
    """Lists sessions, the last used first, in pages: `limit`, `after` (an id), `search`, `tag`.

    With `residence=true` each has its residence and predicted time to first token. With `name` the
    list has at most the session of that name, with `hidden=true` also those of the Responses API.
    """
    owner, engine = owner_of(request), state_of(request).engine.sync

    def read() -> dict[str, Any]:
        if name is not None:
            return _listed_by_name(engine, owner, name)
        try:
            found = engine.sessions(
                owner,
                search=search,
                tag=tag,
                hidden=hidden,
                limit=limit + 1,
                after=after,
            )
        except NotFound:
            raise HttpError(
                400, "after is not the id of a session in the list", param="after"
            ) from None
        page = found[:limit]
        ids = [one.id for one in page] if residence else []
        forecasts = forecasts_by_id(engine, ids, owner)
        data = [views.listed(one, forecasts.get(one.id)) for one in page]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > len(page),
        }

    return await json_answer(await in_thread(read))


def _listed_by_name(engine: ChatEngine, owner: str, name: str) -> dict[str, Any]:
    data = []
    with contextlib.suppress(NotFound):
        session = engine.session_by_name(name, owner=owner)
        data = [{"id": session.id, "object": "session", "name": session.name}]
    one = data[0]["id"] if data else None
    return {"object": "list", "data": data, "first_id": one, "last_id": one, "has_more": False}


@router.get("/v1/sessions/{session_id}")
async def read(
    request: Request,
    session: Opened,
    residence: bool = False,
    token_ids: TokenIds = False,
    details: Details = False,
    refresh: bool = False,
    state: bool = False,
    new_tokens: Annotated[int, Query(ge=1, lt=10**9)] = 32,
    known: Number | None = None,
    dropped: bool = False,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Returns a session with the turns of its conversation.

    Its revision is the ETag. `residence=true` adds where its KV is, `token_ids=true` the tokens,
    `details=true` all else that is stored with the turns. With `state=true` the answer is the state
    alone. `refresh=true` first reads what other processes have stored. With `known=ID` it has only
    the turns after that one, if the conversation has it. `dropped=true` adds the turns that were
    dropped from the prompt because the context was full.
    """
    engine = state_of(request).engine.sync
    if refresh:
        await in_thread(session.refresh)
    if if_none_match == etag(session):
        return Response(status_code=304, headers={"ETag": etag(session)})
    if state:
        return JSONResponse(
            {"id": session.id, "state": session.state.value, "revision": session.revision}
        )

    def made() -> dict[str, Any]:
        found = views.whole(
            session, token_ids=token_ids, details=details, known=known, dropped=dropped
        )
        if residence:
            found |= views.predicted(engine.forecasts([session], new_tokens)[0])
        return found

    found = await in_thread(made)
    return await json_answer(found, headers={"ETag": f'"{found["revision"]}"'})


def etag(session: Session) -> str:
    """Returns the ETag of a session: its revision."""
    return f'"{session.revision}"'


@router.patch("/v1/sessions/{session_id}")
async def change(
    request: Request,
    session: Opened,
    body: Properties,
    details: Details = False,
    if_match: Annotated[str | None, Header()] = None,
) -> JSONResponse:
    """Changes what the body has. A setting of null restores the model's.

    With `If-Match`, the session must have that revision, else the answer is 412.
    """
    body.check(state_of(request).limits)

    def check(revision: int) -> None:
        tags = [one.strip() for one in (if_match or "*").split(",")]
        if "*" not in tags and f'"{revision}"' not in tags:
            raise HttpError(
                412, f"the revision is {revision}, expected {shown(if_match)}", code="revision"
            )

    def made() -> dict[str, Any]:
        session.refresh()
        check(session.revision)
        _change(session, body, check)
        return views.whole(session, details=details)

    found = await in_thread(made)
    return await json_answer(found, headers={"ETag": f'"{found["revision"]}"'})


def _change(session: Session, body: Properties, check: Callable[[int], None] | None = None) -> None:
    """Changes what the body has: first the properties, in one transaction, then the name."""
    given = {name: value for name in PROPERTIES if (value := getattr(body, name)) is not None}
    if given.get("system") == (session.system or ""):
        given.pop("system")  # else the conversation would be built again
    session._update(given, check)
    if body.name is not None and body.name != session.name:
        session.rename(body.name)


@router.delete("/v1/sessions/{session_id}")
async def delete(session: Opened) -> JSONResponse:
    """Stops and deletes a session."""
    session_id = session.id
    await in_thread(session.delete)
    return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})
