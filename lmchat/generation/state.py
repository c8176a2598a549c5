"""The states of a session and the moves between them."""

from __future__ import annotations

from enum import Enum

from lmchat.errors import InternalError


class State(str, Enum):
    """What a session is doing. Where its keys and values are is another question."""

    IDLE = "idle"
    QUEUED = "queued"  # waits for its place in the persistent batch
    PREFILL = "prefill"  # its prompt is computed
    DECODE = "decode"  # tokens come
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
    """`new`, when it may follow `old`; InternalError otherwise."""
    if new not in MOVES[old]:
        raise InternalError(f"a session cannot go from {old} to {new}")
    return new
