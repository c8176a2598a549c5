"""Routes that generate: turns, retry, edit, continue; and that follow and stop replies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import JSONResponse, Response

from lmchat.aio.stream import AsyncFollower
from lmchat.generation.generation import Generation
from lmchat.server.http.event_stream import EventStream, answered
from lmchat.server.http.json_answer import Json, json_answer
from lmchat.server.http.parameters import IdempotencyKey, Number, TokenIds
from lmchat.server.retries.door import Check, Door, Prepare, open_door
from lmchat.server.retries.entries import Entries
from lmchat.server.retries.entry import Entry
from lmchat.server.retries.keys import digest_of
from lmchat.server.retries.receipt import Receipt
from lmchat.server.sessions import views
from lmchat.server.sessions.access import Opened, check_accepting, in_thread
from lmchat.server.sessions.bodies import EditBody, GenerateBody, SessionRoute, StopBody, TurnBody
from lmchat.server.sessions.stream import Place, events
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.session import Session

router = APIRouter(tags=["sessions"], route_class=SessionRoute)

LINGER = 30.0
"""Default of `linger` for a request with a key, in seconds. A client whose connection broke repeats
its request within this time and gets the same reply."""

Start = Callable[[Session, dict[str, Any], Check, str], Generation]
"""Starts a generation of a session. The second argument is metadata to store with it, the others
are `check` and `request` of `Session.start_send()`."""


@router.post("/v1/sessions/{session_id}/turns")
async def send(
    request: Request, session: Opened, body: TurnBody, key: IdempotencyKey = None
) -> Response:
    """Generates a reply to `text`. Without `detach` a disconnect ends the reply, which is kept."""

    def start(session: Session, metadata: dict[str, Any], check: Check, asked: str) -> Generation:
        return session.start_send(
            body.text,
            template_variables=body.template_variables,
            after=body.after,
            before=body.before,
            system=body.system,
            overflow=body.overflow,
            keep_question=body.keep_question,
            metadata=metadata,
            request=asked,
            check=check,
            **body.settings,
        )

    return await _generated(request, session, body, key, "turns", start)


@router.post("/v1/sessions/{session_id}/retry")
async def retry(
    request: Request, session: Opened, body: GenerateBody, key: IdempotencyKey = None
) -> Response:
    """Generates another reply to the last user turn, as a new branch."""

    def start(session: Session, metadata: dict[str, Any], check: Check, asked: str) -> Generation:
        return session.start_retry(metadata=metadata, request=asked, check=check, **body.settings)

    return await _generated(request, session, body, key, "retry", start)


@router.post("/v1/sessions/{session_id}/edit")
async def edit(
    request: Request, session: Opened, body: EditBody, key: IdempotencyKey = None
) -> Response:
    """Generates a reply to `text` in place of user turn `turn` (from 0), as a new branch."""

    def start(session: Session, metadata: dict[str, Any], check: Check, asked: str) -> Generation:
        return session.start_edit(
            body.turn, body.text, metadata=metadata, request=asked, check=check, **body.settings
        )

    return await _generated(request, session, body, key, "edit", start)


@router.post("/v1/sessions/{session_id}/continue")
async def continue_(
    request: Request, session: Opened, body: GenerateBody, key: IdempotencyKey = None
) -> Response:
    """Extends the last reply in place."""

    def start(session: Session, metadata: dict[str, Any], check: Check, asked: str) -> Generation:
        return session.start_continue(
            metadata=metadata, request=asked, check=check, **body.settings
        )

    return await _generated(request, session, body, key, "continue", start)


async def _generated(
    request: Request,
    session: Session,
    body: GenerateBody,
    key: str | None,
    verb: str,
    start: Start,
) -> Response:
    """Starts a generation, or finds that of an equal request, and answers with its reply.

    When the last of its clients has disconnected it stops, at once or after `linger` seconds,
    unless one of them has detached it."""
    check_accepting(request)
    body.check(state_of(request).limits)
    asked = body.model_dump(exclude={"stream", "detach", "linger", "token_ids"})
    digest = digest_of(verb, {**asked, "metadata": None})

    def begin(prepare: Prepare, _at: Session | None) -> tuple[Session, Generation]:
        metadata, check = prepare(session)
        return session, start(session, {**(body.metadata or {}), **metadata}, check, digest)

    linger = body.linger
    if linger is None:
        linger = 0.0 if key is None else LINGER
    door = Door(
        owner_of(request),
        digest,
        lambda: [session],
        begin,
        key=key,
        body=digest_of(verb, asked),
        scope=session.id,
        detach=body.detach,
        linger=linger,
        overflow=getattr(body, "overflow", None),
    )
    entry = await open_door(entries_of(request), door)
    try:
        return Receipt(await _answer(request, session, body, entry), entry)
    except BaseException:
        entry.leave()
        raise


def entries_of(request: Request) -> Entries:
    """Returns the requests whose replies are generated or owed to clients."""
    return state_of(request).part(Entries)


async def _answer(request: Request, session: Session, body: GenerateBody, entry: Entry) -> Response:
    assert entry.answer is not None
    follower = AsyncFollower(entry.answer.follow())
    if body.stream:
        found = events(follower, session.id, token_ids=body.token_ids, whole=entry.whole)
        return EventStream.of(request, found)
    async with follower:
        reply = entry.whole(await answered(request, follower.result()))
    return await in_thread(lambda: Json(views.of_reply(reply, token_ids=body.token_ids)))


@router.get("/v1/sessions/{session_id}/events")
async def follow(
    request: Request,
    session: Opened,
    token_ids: TokenIds = False,
    turn: Number | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Follows the running reply from its start: everything so far, then each new part.

    Any number of clients may follow a reply, also one that another process generates. With nothing
    running it is the last reply, complete. `turn=ID` asks for the reply of that turn, whether it
    runs or is stored. `Last-Event-ID` continues after an event.
    """
    after = None if last_event_id is None else Place.parse(last_event_id)
    running = session.running
    if running is not None and turn in (None, running.turn_id):
        token = -1 if running.lease is None else running.lease.fencing_token
        entry = entries_of(request).live(session, token) or Entry("", answer=running)
        entry.attach(False)
        follower = AsyncFollower(running.follow())
        found = events(follower, session.id, after=after, token_ids=token_ids)
        return Receipt(EventStream.of(request, found), entry)
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
