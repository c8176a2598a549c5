"""Routes that generate: turns, retry, edit, continue; and that follow and stop replies."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from lmchat.aio_stream import AsyncFollower
from lmchat.generation.generation import Generation
from lmchat.generation.reply import Reply
from lmchat.server.body import JsonRoute
from lmchat.server.event_stream import Disconnected, EventStream, answered
from lmchat.server.sessions import repeated, views
from lmchat.server.sessions.access import check_accepting, in_thread, session_of
from lmchat.server.sessions.bodies import EditBody, GenerateBody, StopBody, TurnBody
from lmchat.server.sessions.records import flag, number
from lmchat.server.sessions.repeated import Entry, Repeated
from lmchat.server.sessions.stream import Place, events, stored_events
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn

router = APIRouter(tags=["sessions"], route_class=JsonRoute)

Start = Callable[[Session, dict[str, Any]], Generation]
"""Starts a generation of a session. The second argument is metadata of a new user turn."""


@router.post("/v1/sessions/{session_id}/turns")
async def send(request: Request, body: TurnBody) -> Response:
    """Generates a reply to `text`. Without `detach` a disconnect ends the reply, which is kept."""

    def start(session: Session, metadata: dict[str, Any]) -> Generation:
        return session.start_send(
            body.text,
            template_variables=body.template_variables,
            after=body.after,
            before=body.before,
            system=body.system,
            overflow=body.overflow,
            keep_question=body.keep_question,
            metadata={**(body.metadata or {}), **metadata},
            **body.settings,
        )

    return await _generated(request, body, "turns", start)


@router.post("/v1/sessions/{session_id}/retry")
async def retry(request: Request, body: GenerateBody) -> Response:
    """Generates another reply to the last user turn, as a new branch."""
    return await _generated(
        request, body, "retry", lambda session, _: session.start_retry(**body.settings)
    )


@router.post("/v1/sessions/{session_id}/edit")
async def edit(request: Request, body: EditBody) -> Response:
    """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""

    def start(session: Session, _metadata: dict[str, Any]) -> Generation:
        return session.start_edit(body.turn, body.text, **body.settings)

    return await _generated(request, body, "edit", start)


@router.post("/v1/sessions/{session_id}/continue")
async def continue_(request: Request, body: GenerateBody) -> Response:
    """Extends the last reply in place."""
    return await _generated(
        request, body, "continue", lambda session, _: session.start_continue(**body.settings)
    )


async def _generated(request: Request, body: GenerateBody, verb: str, start: Start) -> Response:
    """Starts a generation, or finds that of a repeated request, and answers with its reply."""
    check_accepting(request)
    body.check(state_of(request).limits)
    session = await session_of(request)
    key = repeated.key_of(request)
    if key is None:
        generation = await in_thread(lambda: start(session, {}))
        return await _answer(request, session, body, Entry("", generation=generation))
    digest = repeated.digest_of(verb, body.model_dump())
    found = await _once(request, session, key, digest, start)
    if isinstance(found, Turn):
        return _stored(request, session, body, found)
    return await _answer(request, session, body, found)


async def _once(
    request: Request, session: Session, key: str, digest: str, start: Start
) -> Entry | Turn:
    """Starts a generation, unless a request with the same key has."""
    owner, table = owner_of(request), _repeated(request)
    entry, is_new = table.enter(owner, session.id, key, digest)
    if not is_new:
        await asyncio.shield(entry.started)
        return entry if entry.earlier is None else entry.earlier
    try:
        found = functools.partial(repeated.stored_turn, session, key, digest)
        earlier = await in_thread(found)
        if earlier is None:
            metadata = repeated.metadata(session.id, key, digest)
            entry.generation = await in_thread(lambda: start(session, metadata))
    except BaseException as error:
        table.forget(owner, session.id, key)
        refusal = error if isinstance(error, Exception) else Disconnected()
        entry.started.set_exception(refusal)
        entry.started.exception()  # asyncio logs those that are not retrieved
        raise
    entry.earlier = earlier
    entry.started.set_result(None)
    return entry if earlier is None else earlier


def _repeated(request: Request) -> Repeated:
    found = getattr(request.app.state, "repeated", None)
    if found is None:
        found = request.app.state.repeated = Repeated()
    assert isinstance(found, Repeated)
    return found


async def _answer(request: Request, session: Session, body: GenerateBody, entry: Entry) -> Response:
    """Answers with a reply. When the last of its clients has disconnected it stops, at once or
    after `linger` seconds, unless one of them has detached it."""
    generation = entry.generation
    assert generation is not None
    follower = AsyncFollower(generation.follow())
    _repeated(request).remember(entry)
    entry.attach(body.detach, body.linger)
    if body.stream:
        found = events(follower, session.id, token_ids=body.token_ids, log=generation.log)
        return EventStream.of(request, _leaving(found, entry))
    try:
        reply = await answered(request, follower.result())
    finally:
        entry.leave()
        follower.close()
    return JSONResponse(views.of_reply(reply, token_ids=body.token_ids))


async def _leaving(found: AsyncIterator[bytes], entry: Entry) -> AsyncIterator[bytes]:
    try:
        async for one in found:
            yield one
    finally:
        entry.leave()


def _stored(request: Request, session: Session, body: GenerateBody, turn: Turn) -> Response:
    if not body.stream:
        return JSONResponse(views.stored_reply(turn, token_ids=body.token_ids))
    return EventStream.of(request, stored_events(turn, session.id, token_ids=body.token_ids))


@router.get("/v1/sessions/{session_id}/events")
async def follow(request: Request) -> EventStream:
    """Follows the running reply from its start: everything so far, then each new part.

    Any number of clients may follow a reply, also one that another process generates. With nothing
    running it is the last reply, complete. `turn=ID` asks for the reply of that turn, whether it
    runs or is stored. `Last-Event-ID` continues after an event.
    """
    session = await session_of(request)
    last = request.headers.get("last-event-id")
    after = None if last is None else Place.parse(last)
    tokens, wanted = flag(request, "token_ids"), number(request, "turn")
    running = session.running
    if running is not None and wanted in (None, running.turn_id):
        entry = _repeated(request).of(running) or Entry("")
        entry.attach(False)
        found = events(
            AsyncFollower(running.follow()),
            session.id,
            after=after,
            token_ids=tokens,
            log=running.log,
        )
        return EventStream.of(request, _leaving(found, entry))
    if wanted is not None:
        turn = (await in_thread(functools.partial(session.conversation, wanted)))[-1]
        return EventStream.of(
            request, stored_events(turn, session.id, after=after, token_ids=tokens)
        )
    follower = AsyncFollower(await in_thread(session.follow))
    return EventStream.of(request, events(follower, session.id, after=after, token_ids=tokens))


@router.post("/v1/sessions/{session_id}/stop")
async def stop(request: Request, body: StopBody | None = None) -> JSONResponse:
    """Stops the running reply, or with `turn` only that reply. What it has is kept."""
    session = await session_of(request)
    wanted = body.turn if body is not None else None

    def stopped() -> Reply | None:
        running = session.running
        if wanted is not None and (running is None or running.turn_id != wanted):
            return None
        return session.stop()

    reply = await in_thread(stopped)
    return JSONResponse(
        {
            "stopped": reply is not None,
            "reply": None if reply is None else views.of_reply(reply, token_ids=True),
        }
    )
