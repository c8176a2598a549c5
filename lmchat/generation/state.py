"""The states of a session and the transitions between them."""

from __future__ import annotations

from enum import Enum

from lmchat.errors import InternalError


class State(str, Enum):
    """The activity of a session. Where its KV is stored is independent of it."""

    IDLE = "idle"
    QUEUED = "queued"  # waits for a slot of the persistent batch
    PREFILL = "prefill"  # its prompt is being computed
    DECODE = "decode"  # its tokens are being generated
    CLOSED = "closed"

    def __str__(self) -> str:
        return self.value


MOVES: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.QUEUED, State.CLOSED}),
    State.QUEUED: frozenset({State.PREFILL, State.IDLE}),
    State.PREFILL: frozenset({State.DECODE, State.IDLE}),
    State.DECODE: frozenset({State.IDLE}),
    State.CLOSED: frozenset(),
}


def move(old: State, new: State) -> State:
    """Returns `new`.

    Raises:
        InternalError: `new` may not follow `old`.
    """
    if new not in MOVES[old]:
        raise InternalError(f"a session cannot go from {old} to {new}")
    return new
