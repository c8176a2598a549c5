"""Turns, and the tree that they form: branches share their prefix.

The transcript of a turn is the exact token ids from the root to its end. It consists of the first
`prefix_length` tokens of its parent's transcript, then the turn's `token_ids`. `prefix_length` is
the parent's whole length, except where the template replaces its end: by another stop token, or by
rewriting earlier turns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmchat.errors import Error, NotFound

Message = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Token counts of one generation.

    Attributes:
        prompt_tokens: tokens before the reply.
        cached_tokens: prompt tokens that had KV already.
        completion_tokens: generated tokens.
        reasoning_tokens: generated tokens that are reasoning.
        rewritten_tokens: earlier tokens replaced because the template changes earlier turns.
        loaded_tokens: cached tokens that were loaded from host memory or disk for this turn.
        foreign_tokens: cached tokens computed by another kind of machine, such as another
            instruction set, or on another number of ranks. They are valid, but not bit-identical.
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
    """Durations of one generation, in seconds.

    Attributes:
        ttft: from the call to the first token.
        tpot: per token after the first; 0.0 for one token.
        total: from the call to the end.
        prepare: part of `ttft` spent on templating and tokenising.
        queued: part of `ttft` spent waiting for a slot of the batch.
    """

    ttft: float = 0.0
    tpot: float = 0.0
    total: float = 0.0
    prepare: float = 0.0
    queued: float = 0.0


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, and its tokens.

    The fields from `reasoning` on are those of a reply.

    Attributes:
        id: unique in the session.
        parent: id of the turn before; None for a root.
        role: "system", "user" or "assistant".
        text: the text to show.
        message: the message that the template gets.
        token_ids: of a user, all tokens that the template puts between two replies; of a reply, the
            generated ones with the stop token.
        prefix_length: length of the prefix of the parent's transcript, in tokens.
        length: length of the transcript up to the end of this turn, in tokens.
        reasoning: the model's reasoning before the text.
        finish_reason: "stop", "length", "cancelled", "error" or "interrupted".
        stopped: whether the last token is a stop token.
        error: the error of finish_reason "error".
        usage: token counts.
        timings: durations.
        settings: all settings of the generation, including the seed.
        metadata: JSON values by key that the caller stores with the turn. Of any role.
        dropped_before: of the first user turn of a conversation whose oldest rounds were dropped
            from a full context: id of the last turn that was dropped, on an older branch.
    """

    id: int
    parent: int | None
    role: str
    text: str
    message: Message
    token_ids: tuple[int, ...] = ()
    prefix_length: int = 0
    length: int = 0
    reasoning: str = ""
    finish_reason: str = ""
    stopped: bool = False
    error: Error | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    settings: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dropped_before: int | None = None


class Unread(Protocol):
    """A stored turn that has not been decoded. Its position and tokens are cheap to read; `turn()`
    decodes the rest."""

    @property
    def parent(self) -> int | None:
        """Id of the parent turn; None for a root."""

    @property
    def prefix_length(self) -> int:
        """Length of the prefix of the parent's transcript, in tokens."""

    @property
    def length(self) -> int:
        """Length of the transcript up to the end of the turn, in tokens."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the turn."""

    def turn(self) -> Turn:
        """Returns the decoded turn.

        Raises:
            StoreError: it is damaged.
        """


class _TurnIds:
    """Allocates turn ids. The versions of a session's tree share it, so that the process never
    gives an id twice, not even after a turn that was not stored."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def new(self) -> int:
        with self._lock:
            self._last += 1
            return self._last

    def reserve(self, turn_id: int) -> None:
        with self._lock:
            self._last = max(self._last, turn_id)


class TurnTree:
    """All turns of a session, immutable. Each path from a root is a conversation.

    Args:
        turns: the turns by id, parents before their children, and siblings oldest first.
    """

    def __init__(self, turns: Iterable[tuple[int, Turn | Unread]] = ()) -> None:
        self._turns: dict[int, Turn | Unread] = {}
        self._children: dict[int | None, tuple[int, ...]] = {None: ()}
        self._ids = _TurnIds()
        for turn_id, turn in turns:
            self._put(turn_id, turn)

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> TurnTree:
        """Returns the tree of turns, which come parents first and siblings oldest first."""
        return cls((turn.id, turn) for turn in turns)

    def new_id(self) -> int:
        """Returns a turn id that no version of this tree has had."""
        return self._ids.new()

    def with_turns(self, turns: Iterable[Turn]) -> TurnTree:
        """Returns a tree with these turns, parents first.

        A turn replaces the one of its id; a new one follows its siblings.
        """
        tree = TurnTree()
        tree._turns, tree._children = dict(self._turns), dict(self._children)
        tree._ids = self._ids
        for turn in turns:
            tree._put(turn.id, turn)
        return tree

    def _put(self, turn_id: int, turn: Turn | Unread) -> None:
        if turn_id not in self._turns:
            self._children[turn.parent] += (turn_id,)
            self._children[turn_id] = ()
            self._ids.reserve(turn_id)
        self._turns[turn_id] = turn

    def get(self, turn_id: int) -> Turn:
        """Returns the turn, decoding it if necessary.

        Raises:
            NotFound: the tree has no such turn.
            StoreError: the stored turn is damaged.
        """
        found = self.place(turn_id)
        if not isinstance(found, Turn):
            found = self._turns[turn_id] = found.turn()  # the same turn, decoded once
        return found

    def place(self, turn_id: int) -> Turn | Unread:
        """Returns the turn without decoding it.

        Raises:
            NotFound: the tree has no such turn.
        """
        try:
            return self._turns[turn_id]
        except KeyError:
            raise NotFound(f"no turn {turn_id}") from None

    def children(self, turn_id: int | None) -> list[Turn]:
        """Returns the children of a turn, or the roots for None, oldest first."""
        return [self.get(i) for i in self._children[turn_id]]

    def ends(self) -> list[int]:
        """Returns the ids of all turns without children, ascending."""
        return sorted(i for i in self._turns if not self._children[i])

    def path(self, turn_id: int | None) -> list[Turn]:
        """Returns the turns from the root to this one; an empty list for None."""
        found = []
        while turn_id is not None:
            turn = self.get(turn_id)
            found.append(turn)
            turn_id = turn.parent
        return found[::-1]

    def dropped(self, path: Sequence[Turn]) -> list[Turn]:
        """Returns the users and replies that were dropped from the prompt of a conversation because
        its context was full, the oldest first. A reader sees them above it.

        Args:
            path: the conversation. Its turns may be new.
        """
        parts: list[list[Turn]] = []
        first = _first_user(path)
        while first is not None and (link := first.dropped_before) is not None:
            if link not in self or link >= first.id:  # a damaged link must not make a loop
                break
            older = self.path(link)
            parts.append([turn for turn in older if turn.role != "system"])
            first = _first_user(older)
        return [turn for part in reversed(parts) for turn in part]

    def newest_leaf(self, turn_id: int) -> Turn:
        """Returns the last turn of the newest conversation that contains the turn."""
        while children := self._children.get(turn_id):
            turn_id = children[-1]
        return self.get(turn_id)

    def token_ids(self, turn_id: int | None) -> list[int]:
        """Returns the transcript up to the end of the turn."""
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


def _first_user(path: Iterable[Turn]) -> Turn | None:
    return next((turn for turn in path if turn.role == "user"), None)


def transcript(path: Sequence[Turn | Unread]) -> list[int]:
    """Returns the transcript of a path from a root, as token ids."""
    ids: list[int] = []
    for turn in path:
        del ids[turn.prefix_length :]
        ids += turn.token_ids
    return ids


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the length of the common prefix, in tokens or characters. Fast for two of the same
    type."""
    if type(one) is not type(other):
        one, other = list(one), list(other)
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
