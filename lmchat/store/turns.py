"""Turns and the tree they form: branches share their past.

The transcript of a turn is the exact token ids from the beginning to its end. Each turn says how
its transcript follows from its parent's: the first `keep` tokens of that one, then `token_ids`.
`keep` is the parent's whole length except where something is replaced at the border: a stop token
that the template spells otherwise, or a past that the template rewrites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmchat.errors import Error, NotFound

Message = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation.

    `prompt_tokens` stood before the reply; `cached_tokens` of them had keys and values already;
    `completion_tokens` were produced, `reasoning_tokens` of them as reasoning. `rewritten_tokens`
    of the past were replaced because the template changes earlier turns. Of the cached tokens,
    `loaded_tokens` came up from host memory or disk for this turn, and `foreign_tokens` were
    computed by another kind of machine (another instruction set, say): good, but not bit for bit.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    rewritten_tokens: int = 0
    loaded_tokens: int = 0
    foreign_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds: `ttft` from the call to the first token, `tpot` per token after it (0.0 for one
    token), `total` from the call to the end. Of `ttft`, `prepare` went into templating and
    tokenising, `queued` into waiting for a place in the batch."""

    ttft: float = 0.0
    tpot: float = 0.0
    total: float = 0.0
    prepare: float = 0.0
    queued: float = 0.0


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, and its tokens.

    `message` is what the template gets. A user's `token_ids` are all the template puts between the
    reply before and the reply to come; a reply's are those that were generated, its stop token
    included (`stopped`: the last one is that). `length` is the transcript's, up to this turn's end.
    The fields from `reasoning` on are a reply's.
    """

    id: int
    parent: int | None
    role: str  # "system", "user", "assistant"
    text: str
    message: Message
    token_ids: tuple[int, ...] = ()
    keep: int = 0
    length: int = 0
    reasoning: str = ""
    finish_reason: str = ""  # "stop", "length", "cancelled", "error", "interrupted"
    stopped: bool = False
    error: Error | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    settings: Mapping[str, Any] = field(default_factory=dict)  # the effective seed among them


class Unread(Protocol):
    """A turn of a store that nobody has looked at: to know its place and its tokens takes little,
    the rest is read by `turn()`."""

    @property
    def parent(self) -> int | None:
        """As the turn's."""

    @property
    def keep(self) -> int:
        """As the turn's."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """As the turn's."""

    def turn(self) -> Turn:
        """The turn. StoreError where it is damaged."""


class TurnTree:
    """All turns of a session. Every path from a root is a conversation."""

    def __init__(self) -> None:
        self._turns: dict[int, Turn | Unread] = {}
        self._children: dict[int | None, list[int]] = {None: []}
        self._last_id = 0

    def new_id(self) -> int:
        """An id that no turn has had."""
        self._last_id += 1
        return self._last_id

    def reserve(self, turn_id: int) -> None:
        """No new turn gets this id any more."""
        self._last_id = max(self._last_id, turn_id)

    def add(self, turn: Turn) -> Turn:
        """Hangs a turn under its parent, after its siblings."""
        self._turns[turn.id] = turn
        self._children[turn.id] = []
        self._children[turn.parent].append(turn.id)
        return turn

    def copy(self) -> TurnTree:
        """A tree of its own with the same turns."""
        tree = TurnTree()
        tree._turns = dict(self._turns)
        tree._children = {turn: list(children) for turn, children in self._children.items()}
        tree._last_id = self._last_id
        return tree

    def adopt(self, turn: Turn) -> None:
        """As `add()`, for a turn of another tree, under the id it has there."""
        self.reserve(turn.id)
        self.add(turn)

    def adopt_unread(self, turn_id: int, turn: Unread) -> None:
        """As `adopt()`, for a turn that is read when somebody looks at it."""
        self.reserve(turn_id)
        self._turns[turn_id] = turn
        self._children[turn_id] = []
        self._children[turn.parent].append(turn_id)

    def replace(self, turn: Turn) -> Turn:
        """Puts a changed turn in the place of the one with its id."""
        self._turns[turn.id] = turn
        return turn

    def remove(self, turn_id: int) -> None:
        """Takes out a turn without children."""
        turn = self._turns.pop(turn_id)
        del self._children[turn_id]
        self._children[turn.parent].remove(turn_id)

    def get(self, turn_id: int) -> Turn:
        """The turn; raises NotFound."""
        found = self.place(turn_id)
        if not isinstance(found, Turn):
            found = self._turns[turn_id] = found.turn()
        return found

    def place(self, turn_id: int) -> Turn | Unread:
        """The turn, maybe unread: where it hangs and its tokens are known. NotFound."""
        try:
            return self._turns[turn_id]
        except KeyError:
            raise NotFound(f"no turn {turn_id}") from None

    def children(self, turn_id: int | None) -> list[Turn]:
        """In the order they were made."""
        return [self.get(i) for i in self._children[turn_id]]

    def ends(self) -> list[int]:
        """The ids of the turns without children: the ends of all branches, ascending."""
        return sorted(i for i in self._turns if not self._children[i])

    def path(self, turn_id: int | None) -> list[Turn]:
        """From the root to the turn; empty for None."""
        found = []
        while turn_id is not None:
            turn = self.get(turn_id)
            found.append(turn)
            turn_id = turn.parent
        return found[::-1]

    def newest_leaf(self, turn_id: int) -> Turn:
        """The end of the newest conversation that goes through the turn."""
        while children := self._children.get(turn_id):
            turn_id = children[-1]
        return self.get(turn_id)

    def token_ids(self, turn_id: int | None) -> list[int]:
        """The transcript up to the turn's end."""
        path: list[Turn | Unread] = []
        while turn_id is not None:
            path.append(self.place(turn_id))
            turn_id = path[-1].parent
        return transcript(path[::-1])

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._turns

    def __iter__(self) -> Iterator[Turn]:
        return map(self.get, self._turns)

    def __len__(self) -> int:
        return len(self._turns)


def transcript(path: Sequence[Turn | Unread]) -> list[int]:
    """The token ids of a path from a root."""
    ids: list[int] = []
    for turn in path:
        del ids[turn.keep :]
        ids += turn.token_ids
    return ids
