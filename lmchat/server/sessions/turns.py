"""Routes that generate: turns, retry, edit, continue; and that follow and stop replies."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import JSONResponse, Response

from lmchat.aio_stream import AsyncFollower
from lmchat.errors import SessionBusy
from lmchat.generation.generation import Generation
from lmchat.generation.reply_stream import Follower
from lmchat.server.http.body import JsonRoute
from lmchat.server.http.event_stream import Disconnected, EventStream, answered
from lmchat.server.http.json_answer import Json, json_answer
from lmchat.server.http.parameters import IdempotencyKey, Number, TokenIds
from lmchat.server.sessions import repeated, views
from lmchat.server.sessions.access import Opened, check_accepting, in_thread
from lmchat.server.sessions.bodies import EditBody, GenerateBody, StopBody, TurnBody
from lmchat.server.sessions.repeated import Entry, Repeated
from lmchat.server.sessions.stream import Place, events
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.remote_reply import stored_reply
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn, TurnTree

router = APIRouter(tags=["sessions"], route_class=JsonRoute)

Check = Callable[[TurnTree], object]

Start = Callable[[Session, dict[str, Any], Check | None], Generation]
"""Starts a generation of a session. The second argument is metadata to store with it, the third
that of `Session.start_send()`."""


@router.post("/v1/sessions/{session_id}/turns")
async def send(
    request: Request, session: Opened, body: TurnBody, key: IdempotencyKey = None
) -> Response:
    """Generates a reply to `text`. Without `detach` a disconnect ends the reply, which is kept."""

    def start(session: Session, metadata: dict[str, Any], check: Check | None) -> Generation:
        return session.start_send(
            body.text,
            template_variables=body.template_variables,
            after=body.after,
            before=body.before,
            system=body.system,
            overflow=body.overflow,
            keep_question=body.keep_question,
            metadata=metadata,
            check=check,
            **body.settings,
        )

    return await _generated(request, session, body, key, "turns", start)


@router.post("/v1/sessions/{session_id}/retry")
async def retry(
    request: Request, session: Opened, body: GenerateBody, key: IdempotencyKey = None
) -> Response:
    """Generates another reply to the last user turn, as a new branch."""

    def start(session: Session, metadata: dict[str, Any], check: Check | None) -> Generation:
        return session.start_retry(metadata=metadata, check=check, **body.settings)

    return await _generated(request, session, body, key, "retry", start)


@router.post("/v1/sessions/{session_id}/edit")
async def edit(
    request: Request, session: Opened, body: EditBody, key: IdempotencyKey = None
) -> Response:
    """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""

    def start(session: Session, metadata: dict[str, Any], check: Check | None) -> Generation:
        return session.start_edit(
            body.turn, body.text, metadata=metadata, check=check, **body.settings
        )

    return await _generated(request, session, body, key, "edit", start)


@router.post("/v1/sessions/{session_id}/continue")
async def continue_(
    request: Request, session: Opened, body: GenerateBody, key: IdempotencyKey = None
) -> Response:
    """Extends the last reply in place."""

    def start(session: Session, metadata: dict[str, Any], check: Check | None) -> Generation:
        return session.start_continue(metadata=metadata, check=check, **body.settings)

    return await _generated(request, session, body, key, "continue", start)


async def _generated(
    request: Request,
    session: Session,
    body: GenerateBody,
    key: str | None,
    verb: str,
    start: Start,
) -> Response:
    """Starts a generation, or finds that of a repeated request, and answers with its reply."""
    check_accepting(request)
    body.check(state_of(request).limits)
    metadata = body.metadata or {}
    if key is None:
        generation = await in_thread(lambda: start(session, metadata, None))
        return await _answer(request, session, body, Entry("", generation=generation), 0.0)
    digest = repeated.digest_of(verb, body.model_dump())
    metadata = {**metadata, **repeated.metadata(session.id, key, digest)}
    check = functools.partial(repeated.check_new, session_id=session.id, key=key, digest=digest)
    found = await _once(request, session, key, digest, lambda: start(session, metadata, check))
    if isinstance(found, Follower):
        return await _followed(request, session, body, AsyncFollower(found))
    return await _answer(request, session, body, found, repeated.LINGER)


async def _once(
    request: Request, session: Session, key: str, digest: str, start: Callable[[], Generation]
) -> Entry | Follower:
    """Starts a generation, unless a request with the same key has, in any process, and its reply is
    there."""
    owner, table = owner_of(request), _repeated(request)
    entry, is_new = table.enter(owner, session.id, key, digest)
    while not is_new:
        await asyncio.shield(entry.started)
        if await entry.produces():
            return entry if entry.earlier is None else stored_reply(entry.earlier)
        table.forget(owner, session.id, key, entry)
        entry, is_new = table.enter(owner, session.id, key, digest)
    try:
        found = await in_thread(functools.partial(_found, session, key, digest, start))
    except BaseException as error:
        table.forget(owner, session.id, key, entry)
        refusal = error if isinstance(error, Exception) else Disconnected()
        entry.started.set_exception(refusal)
        entry.started.exception()  # asyncio logs those that are not retrieved
        raise
    if isinstance(found, Generation):
        entry.generation = found
    elif isinstance(found, Turn):
        entry.earlier = found
    else:  # another process generates it: the next request looks for it again
        table.forget(owner, session.id, key, entry)
    entry.started.set_result(None)
    if isinstance(found, Follower):
        return found
    return entry if entry.earlier is None else stored_reply(entry.earlier)


def _found(
    session: Session, key: str, digest: str, start: Callable[[], Generation]
) -> Generation | Turn | Follower:
    """Returns the reply of a key: running in another process, or stored, or started here."""
    find = functools.partial(repeated.find, session, key, digest)
    if (reply := find()) is not None:
        return reply
    try:
        return start()
    except repeated.Stored as stored:
        return stored.turn
    except SessionBusy:  # another process may have started the reply of this key meanwhile
        if (reply := find()) is not None:
            return reply
        raise


def _repeated(request: Request) -> Repeated:
    return state_of(request).part(Repeated)


async def _answer(
    request: Request, session: Session, body: GenerateBody, entry: Entry, linger: float
) -> Response:
    """Answers with a reply. When the last of its clients has disconnected it stops, at once or
    after `linger` seconds, unless one of them has detached it. `linger` is that of the body or the
    given default."""
    generation = entry.generation
    assert generation is not None
    follower = AsyncFollower(generation.follow())
    _repeated(request).remember(entry)
    entry.attach(body.detach, linger if body.linger is None else body.linger)
    if body.stream:
        found = events(follower, session.id, token_ids=body.token_ids)
        return EventStream.of(request, _leaving(found, entry))
    try:
        reply = await answered(request, follower.result())
    finally:
        entry.leave()
        follower.close()
    return await in_thread(lambda: Json(views.of_reply(reply, token_ids=body.token_ids)))


async def _leaving(found: AsyncIterator[bytes], entry: Entry) -> AsyncIterator[bytes]:
    try:
        async for one in found:
            yield one
    finally:
        entry.leave()


async def _followed(
    request: Request, session: Session, body: GenerateBody, follower: AsyncFollower
) -> Response:
    """Answers with a reply of another process, or with a stored one."""
    if body.stream:
        return EventStream.of(request, events(follower, session.id, token_ids=body.token_ids))
    async with follower:
        reply = await answered(request, follower.result())
    return await in_thread(lambda: Json(views.of_reply(reply, token_ids=body.token_ids)))


@router.get("/v1/sessions/{session_id}/events")
async def follow(
    request: Request,
    session: Opened,
    token_ids: TokenIds = False,
    turn: Number | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventStream:
    """Follows the running reply from its start: everything so far, then each new part.

    Any number of clients may follow a reply, also one that another process generates. With nothing
    running it is the last reply, complete. `turn=ID` asks for the reply of that turn, whether it
    runs or is stored. `Last-Event-ID` continues after an event.
    """
    after = None if last_event_id is None else Place.parse(last_event_id)
    running = session.running
    if running is not None and turn in (None, running.turn_id):
        entry = _repeated(request).of(running) or Entry("")
        entry.attach(False)
        follower = AsyncFollower(running.follow())
        found = events(follower, session.id, after=after, token_ids=token_ids)
        return EventStream.of(request, _leaving(found, entry))
    follower = AsyncFollower(await in_thread(functools.partial(session.follow, turn)))
    return EventStream.of(request, events(follower, session.id, after=after, token_ids=token_ids))


@router.post("/v1/sessions/{session_id}/stop")
async def stop(session: Opened, body: StopBody | None = None) -> JSONResponse:
    """Stops the running reply, or with `turn` only that reply. What it has is kept."""
    turn = body.turn if body is not None else None
    reply = await in_thread(functools.partial(session.stop, turn))
    return await json_answer(
        {
            "stopped": reply is not None,
            "reply": None if reply is None else views.of_reply(reply, token_ids=True),
        }
    )
