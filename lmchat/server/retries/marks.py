"""What the store has of the client's request that the last turn of a session answers."""

from __future__ import annotations

import contextlib
import functools

from lmchat.errors import Error
from lmchat.sessions.session import Session
from lmchat.store.records import AskedState, TurnRequest


def read(session: Session) -> TurnRequest | None:
    """Returns the request, or None if no client's request made the last turn.

    Raises:
        NotFound: the session was deleted.
        StoreError: it cannot be read.
    """
    return session._runtime.store.request(session._record)


def mark_later(
    session: Session, fencing_token: int, state: AskedState, again: bool = False
) -> None:
    """Stores what became of the request whose turn has this lease, on another thread. A settled one
    stays so, unless `again`."""
    session._runtime.worker.later(functools.partial(_mark, session, fencing_token, state, again))


def _mark(session: Session, fencing_token: int, state: AskedState, again: bool) -> None:
    with contextlib.suppress(Error):  # then it counts as open while this process lives
        session._runtime.store.mark_request(session._record, fencing_token, state, again)
