"""The session that a request names, and work on it in another thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Request

from lmchat.aio.threads import shared
from lmchat.errors import NotFound
from lmchat.server.errors import HttpError
from lmchat.server.state import owner_of, state_of
from lmchat.sessions.session import Session
from turbomind.shown import shown

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Does work that may wait in another thread."""
    return await shared.run(work)


def location(request: Request, session_id: str) -> dict[str, str]:
    """Returns the header that names the path of a new session."""
    return {"Location": f"{request.scope['root_path']}/v1/sessions/{session_id}"}


async def session_of(
    request: Request, session_id: Annotated[str, Path(description="id of the session")]
) -> Session:
    """Returns the session that the path names.

    Raises:
        HttpError: the owner has no such session. The answer is the same for one of another owner.
    """
    engine, owner = state_of(request).engine.sync, owner_of(request)
    try:
        return await in_thread(functools.partial(engine.session_by_id, session_id, owner=owner))
    except NotFound:
        raise HttpError(
            404, f"no session of the id {shown(session_id)}", code="not_found"
        ) from None


Opened = Annotated[Session, Depends(session_of)]
"""The session that the path names, as a parameter of a route."""


def check_accepting(request: Request) -> None:
    """Refuses new generations while the server ends."""
    if state_of(request).draining:
        raise HttpError(503, "the server is shutting down", code="shutting_down")
