"""Deletes sessions of this dialect that were not used for some time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from datetime import datetime, timedelta, timezone

from lmchat.aio_threads import shared
from lmchat.engine import ChatEngine, SessionInfo
from lmchat.errors import Error
from lmchat.generation.state import State
from lmchat.server.responses import RESPONSE, TAG

UNUSED = timedelta(days=30)
"""Time without use after which a session is deleted."""

EVERY_SECONDS = 3600.0
"""Time between two looks."""


def delete_unused(engine: ChatEngine, now: datetime | None = None) -> int:
    """Deletes the tagged sessions that were last used more than `UNUSED` before `now`.

    Returns:
        Their number.
    """
    oldest = (now or datetime.now(timezone.utc)) - UNUSED
    return sum(_deleted(engine, one) for one in engine.sessions(tag=TAG) if one.last_used < oldest)


def delete_oldest(engine: ChatEngine, owner: str, most: int) -> int:
    """Deletes an owner's responses that were unused for the longest time, with their sessions.
    Conversations stay: a program has created them.

    Args:
        engine: the engine.
        owner: the owner.
        most: largest number of sessions to delete.

    Returns:
        Their number.
    """
    responses = (
        one for one in reversed(engine.sessions(owner, tag=TAG)) if one.name.startswith(RESPONSE)
    )
    deleted = (one for one in responses if _deleted(engine, one))
    return sum(1 for _ in itertools.islice(deleted, most))


def _deleted(engine: ChatEngine, session: SessionInfo) -> bool:
    """Deletes a session unless it is in use or pinned. Returns whether it did."""
    if session.busy or session.pinned or session.state not in (State.IDLE, State.CLOSED):
        return False
    with contextlib.suppress(Error):  # another program has used or deleted it
        engine.delete(session.name, session.owner)
        return True
    return False


async def delete_forever(engine: ChatEngine) -> None:
    """Deletes unused sessions until it is cancelled."""
    while True:
        try:
            deleted = await shared.run(delete_unused, engine)
            if deleted:
                logging.getLogger(__name__).info("deleted %d unused responses", deleted)
        except Error as error:
            name = type(error).__name__
            logging.getLogger(__name__).warning("unused responses were not deleted: %s", name)
        await asyncio.sleep(EVERY_SECONDS)
