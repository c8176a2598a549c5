"""What the next turns of many sessions cost, for lists of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lmchat.errors import NotFound, StoreError
from turbomind import Forecast

if TYPE_CHECKING:
    from lmchat.engine import ChatEngine
    from lmchat.sessions.session import Session


def forecasts_by_id(
    engine: ChatEngine, ids: Iterable[str], owner: str, new_tokens: int = 32
) -> dict[str, Forecast]:
    """Returns `ChatEngine.forecasts()` of an owner's sessions, by id.

    It leaves out sessions that were deleted since the list was read, that cannot be read, or whose
    conversation is one of another tokenizer.

    Args:
        engine: the engine.
        ids: ids of the sessions.
        owner: their owner.
        new_tokens: tokens of the next message.
    """
    opened: list[Session] = []
    for session_id in ids:
        with contextlib.suppress(NotFound, StoreError):
            session = engine.session_by_id(session_id, owner=owner)
            if not session._is_foreign:
                opened.append(session)
    costs = engine.forecasts(opened, new_tokens)
    return {session.id: cost for session, cost in zip(opened, costs, strict=True)}
