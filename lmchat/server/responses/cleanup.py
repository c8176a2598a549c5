"""Deletes responses that were not used for some time. Nothing else is deleted by its age."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Iterator

from lmchat.aio.threads import shared
from lmchat.engine import ChatEngine
from lmchat.errors import Error
from lmchat.generation.state import State
from lmchat.interface.engine import SessionInfo
from lmchat.server.responses import RESPONSE, TAG
from lmchat.server.responses.objects import is_chained
from lmchat.store.use_time import UseTime

UNUSED_SECONDS = 30 * 86400.0
"""Time without use after which a response is deleted, of the time in which the store was in use."""

EVERY_SECONDS = 3600.0
"""Time between two looks."""

_NAME = re.compile(rf"{RESPONSE}-[0-9a-f]{{16}}")


def delete_unused(engine: ChatEngine, use_time: UseTime) -> int:
    """Deletes responses, with their sessions, that were not used for `UNUSED_SECONDS`.

    Returns:
        Their number.
    """
    oldest = use_time.unused_since(UNUSED_SECONDS)
    if oldest is None:
        return 0
    return sum(_deleted(engine, one) for one in _responses(engine) if one.last_used <= oldest)


def delete_oldest(engine: ChatEngine, owner: str, most: int) -> int:
    """Deletes an owner's responses that were unused for the longest time, with their sessions.

    Args:
        engine: the engine.
        owner: the owner.
        most: largest number of sessions to delete.

    Returns:
        Their number.
    """
    deleted = (one for one in _responses(engine, owner) if _deleted(engine, one))
    return sum(1 for _ in itertools.islice(deleted, most))


def _responses(engine: ChatEngine, owner: str | None = None) -> Iterator[SessionInfo]:
    """Yields the sessions that were made for responses, the longest unused first. Conversations are
    not among them, which a program has created, nor sessions that a user has named."""
    for one in reversed(engine.sessions(owner, tag=TAG)):
        if _NAME.fullmatch(one.name):
            yield one


def _deleted(engine: ChatEngine, session: SessionInfo) -> bool:
    """Deletes a session unless it is in use, pinned, or was continued as a chat. Returns whether it
    did."""
    if session.busy or session.pinned or session.state not in (State.IDLE, State.CLOSED):
        return False
    with contextlib.suppress(Error):  # another program has used or deleted it
        turns = engine.session_by_id(session.id, owner=session.owner).turns
        if len(turns) > 1 and not is_chained(turns):
            return False
        engine.delete(session.name, session.owner)
        return True
    return False


async def delete_forever(engine: ChatEngine) -> None:
    """Counts the time in use and deletes unused responses until it is cancelled."""
    use_time = UseTime(engine._runtime.store)
    try:
        while True:
            await shared.run(_look, engine, use_time)
            await asyncio.sleep(EVERY_SECONDS)
    finally:
        with contextlib.suppress(Error):
            use_time.mark()


def _look(engine: ChatEngine, use_time: UseTime) -> None:
    log = logging.getLogger(__name__)
    try:
        use_time.mark()
        if deleted := delete_unused(engine, use_time):
            log.info("deleted %d unused responses", deleted)
    except Error as error:
        log.warning("unused responses were not deleted: %s", type(error).__name__)
