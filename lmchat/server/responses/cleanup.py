"""Deletes sessions of this dialect that were not used for some time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import datetime, timedelta, timezone

from lmchat.aio_threads import shared
from lmchat.engine import ChatEngine
from lmchat.errors import Error
from lmchat.generation.state import State
from lmchat.server.responses import TAG

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
    deleted = 0
    for one in engine.sessions(tag=TAG):
        if one.last_used >= oldest or one.busy or one.pinned:
            continue
        if one.state in (State.IDLE, State.CLOSED):
            with contextlib.suppress(Error):  # another program has used or deleted it
                engine.delete(one.name, one.owner)
                deleted += 1
    return deleted


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
