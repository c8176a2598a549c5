"""Routes of `/v1/conversations`. A conversation is a durable session."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse

from lmchat.aio.threads import shared
from lmchat.errors import NotFound
from lmchat.server.errors import HttpError
from lmchat.server.http.body import Body, JsonRoute
from lmchat.server.http.parameters import IdempotencyKey
from lmchat.server.responses import ids, items
from lmchat.server.responses.begin import after_waiting, find, session_name, waiting_in
from lmchat.server.responses.body import Metadata, with_example
from lmchat.server.responses.routes import responses_of
from lmchat.server.retries import keys
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.appended import PARTS, joined
from lmchat.sessions.session import Session
from lmchat.store.once import Once

router = APIRouter(tags=["OpenAI Conversations"], route_class=JsonRoute)


_ITEM = {"type": "message", "role": "user", "content": "My dog is called Waffles."}


class ConversationBody(Body):
    """The body of `POST /v1/conversations`."""

    model_config = with_example({"metadata": {"topic": "dogs"}, "items": [_ITEM]})

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    """The body of `POST /v1/conversations/ID`."""

    model_config = with_example({"metadata": {"topic": "dogs"}})

    metadata: Metadata = Field(default_factory=dict)


class ItemsBody(Body):
    """The body of `POST /v1/conversations/ID/items`."""

    model_config = with_example({"items": [_ITEM]})

    items: list[dict[str, Any]]


@router.post("/v1/conversations")
async def create(
    request: Request, body: ConversationBody, key: IdempotencyKey = None
) -> JSONResponse:
    """Creates a conversation, with the first of its items."""
    state, owner = state_of(request), owner_of(request)
    given = items.parse(body.items, state.limits.messages, "items")
    beginner = responses_of(request).beginner

    once = keys.once(key, "conversation", body.model_dump())

    def make() -> Session:
        name = None
        if once is not None:
            name = session_name("conversation", once.key)
            with contextlib.suppress(NotFound):
                session = state.engine.sync.session_by_name(name, owner=owner)
                if once.is_made(session._record.keys):
                    return session
                name = None if session._record.keys else name  # that of an old request
        session = beginner.new_session(owner, "conversation", body.metadata or {}, name)
        try:
            _append(session, given, once)
        except BaseException:
            if key is None:  # else an earlier request may have made it
                session.delete()
            raise
        return session

    return JSONResponse(_conversation(await shared.run(make)))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve(request: Request, conversation_id: str) -> JSONResponse:
    """Returns a conversation."""
    return JSONResponse(_conversation(await _session(request, conversation_id)))


@router.post("/v1/conversations/{conversation_id}")
async def update(request: Request, conversation_id: str, body: MetadataBody) -> JSONResponse:
    """Replaces a conversation's metadata."""
    session = await _session(request, conversation_id)
    await shared.run(session.set_metadata, body.metadata)
    return JSONResponse(_conversation(session))


@router.delete("/v1/conversations/{conversation_id}")
async def delete(request: Request, conversation_id: str) -> JSONResponse:
    """Deletes a conversation with its responses."""
    session = await _session(request, conversation_id)
    await shared.run(session.delete)
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    request: Request, conversation_id: str, page: Annotated[items.Page, Query()]
) -> JSONResponse:
    """Lists the items of a conversation."""
    session = await _session(request, conversation_id)
    return JSONResponse(items.page(page, await shared.run(_items, session)))


@router.post("/v1/conversations/{conversation_id}/items")
async def create_items(
    request: Request, conversation_id: str, body: ItemsBody, key: IdempotencyKey = None
) -> JSONResponse:
    """Appends items to a conversation and generates nothing."""
    session = await _session(request, conversation_id)
    given = items.parse(body.items, state_of(request).limits.messages, "items")

    beginner = responses_of(request).beginner
    once = keys.once(key, "items", body.model_dump())

    def append() -> list[dict[str, Any]]:
        with beginner.holding(session):
            _append(session, given, once)
            return _last_items(_items(session), given)

    found = await shared.run(append)
    return JSONResponse(
        {
            "object": "list",
            "data": found,
            "first_id": found[0]["id"] if found else "",
            "last_id": found[-1]["id"] if found else "",
            "has_more": False,
        }
    )


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> JSONResponse:
    """Returns one item."""
    session = await _session(request, conversation_id)
    for item in await shared.run(_items, session):
        if item["id"] == item_id:
            return JSONResponse(item)
    raise ids.not_found("item", item_id)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> JSONResponse:
    """Refuses to delete an item: the model has read it, and later turns follow it."""
    await retrieve_item(request, conversation_id, item_id)
    raise HttpError(400, "items cannot be deleted; delete the conversation, or start another one")


async def _session(request: Request, conversation_id: str) -> Session:
    engine, owner = state_of(request).engine.sync, owner_of(request)
    session_id = ids.session_of(conversation_id)
    return await shared.run(find, engine, owner, session_id, "conv", conversation_id)


def _append(session: Session, given: items.Input, once: Once | None) -> None:
    """Appends an input. A first user message joins one that waits for a reply."""
    if once is not None and once.is_made(session._record.keys):
        return
    system = joined(session.system or "", given.system) if given.system else None
    messages = list(given.messages)
    if len(messages) > 1 or (messages and messages[0]["role"] == "assistant"):
        messages = after_waiting(given, waiting_in(session), "items")
    if messages or system is not None or once is not None:
        session.append(messages, system=system, once=once)


def _items(session: Session) -> list[dict[str, Any]]:
    """Returns all items of a conversation, with those that a full context has dropped from its
    prompt and a user message that has no reply yet."""
    turns, dropped = session.turns, session.dropped
    first = int(bool(turns) and turns[0].role == "system")
    found = items.of_turns(session.id, [*turns[:first], *dropped, *turns[first:]])
    waiting = waiting_in(session)
    return [
        *found,
        *(items.of_input(f"msg_{session.id}_unanswered", "user", waiting) if waiting.text else ()),
    ]


def _last_items(found: list[dict[str, Any]], given: items.Input) -> list[dict[str, Any]]:
    """Returns the items of a conversation that an input has made."""
    count = sum(len(one.get(PARTS, ())) or 1 for one in given.messages)
    if given.messages and given.messages[-1] == {"role": "user", "content": ""}:
        count -= 1  # nothing waits for a reply
    system = found[:1] if given.system else []
    return [*system, *found[len(found) - count :]]


def _conversation(session: Session) -> dict[str, Any]:
    return {
        "id": ids.of_conversation(session.id),
        "object": "conversation",
        "created_at": int(session.created.timestamp()),
        "metadata": session.metadata,
    }
