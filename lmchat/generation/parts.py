"""The parts of a reply while it is generated, for any number of readers.

One thread appends, and the readers wait for nothing but new parts. Parts are nodes of a linked
list, and a reader has the node that it read last. So appending costs the same for any number of
readers, and what all of them have read is freed. The log itself has older parts merged: a reader
that comes late gets a few large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from lmchat.errors import InvalidRequest
from lmchat.generation.interruptible_event import InterruptibleEvent
from turbomind import TokenLogprobs

if TYPE_CHECKING:
    from lmchat.errors import Error
    from lmchat.generation.reply import Reply
    from lmchat.store.turns import Turn

MERGE = 64  # newest parts that stay as they are


class Delta(NamedTuple):  # one per token: a frozen dataclass takes three times as long to make
    """New text of a reply, and the tokens that it came with.

    Joined over a choice, the texts of kind "text" equal `Reply.text`, the token ids
    `Reply.token_ids` and the log-probabilities `Reply.logprobs`. The deltas of the stream of a
    continued reply have what is new; those of a follower have the whole reply.

    Attributes:
        kind: whether `text` is shown or is reasoning.
        text: new text; empty while it is held back, because it may start a stop string or end
            inside a character.
        token_ids: tokens since the previous delta of the choice. Those that a stop string may still
            cut off come later or never.
        logprobs: one entry per token if they were requested, else empty.
        choice: index of the choice, from 0.
        seconds: time at which the engine produced the last of the tokens, on the clock of
            `time.perf_counter`. 0.0 for tokens of another process or of an earlier call.
    """

    kind: Literal["text", "reasoning"]
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that have KV: `done` of `total`. `cached` of them had it before."""

    done: int
    total: int
    cached: int = 0


Part: TypeAlias = Delta | Progress


class _Node:
    """A part, and the node that follows it."""

    __slots__ = ("following", "part")

    def __init__(self, part: Part | None = None) -> None:
        self.part = part
        self.following: _Node | None = None


class PartsLog:
    """The parts of one reply, and its end. It outlives the generation, of which it holds nothing.

    One thread at a time appends and ends it; any number of threads read and listen.
    """

    def __init__(self) -> None:
        self.done = False
        """Whether the reply has ended. Nothing is appended afterwards."""
        self.reply: Reply | None = None
        """The reply. None before the end, and if it failed before its first token."""
        self.error: Error | None = None
        """The error of a reply that failed before its first token."""
        self.turn_id: int | None = None
        """Id of the turn that the reply is or becomes; None without a session."""
        self.before: tuple[Delta, ...] = ()
        """What a continued reply had before. Set before the first part is appended."""
        self.preceding: Callable[[], tuple[Turn, ...]] = tuple
        """Returns the turns before a running reply. After the end the session has them all."""
        self.dropped: Callable[[], tuple[Turn, ...]] = tuple
        """Returns what was dropped from the prompt before `preceding()`."""
        self.metadata: Mapping[str, Any] = {}
        """What is stored with a running reply, or with its new question."""
        self._merged: list[Part] = []  # only grows
        # Number of merged parts, and the node whose followers come after them. Replaced as one.
        self._late = (0, _Node())
        self._last = self._late[1]
        self._recent = 0  # parts that are not merged
        self._changed = InterruptibleEvent()
        self._listeners: dict[object, Callable[[], None]] = {}

    # --- the thread that writes ------------------------------------------------------------------

    def append(self, parts: Sequence[Part]) -> None:
        """Adds parts and wakes the readers."""
        for part in parts:
            node = _Node(part)
            self._last.following = node
            self._last = node
        self._recent += len(parts)
        if self._recent >= MERGE:
            self._merge()
        self.notify()

    def end(self, reply: Reply | None, error: Error | None) -> None:
        """Ends the reply, with an error if it failed before its first token."""
        self.reply, self.error = reply, error
        self.done = True
        self.preceding = self.dropped = tuple  # releases the turns
        self.notify()
        self._listeners.clear()

    def _merge(self) -> None:
        count, node = self._late
        found = merged(_after(node)[1])
        self._merged += found
        self._late = (count + len(found), self._last)
        self._recent = 0

    # --- any thread ------------------------------------------------------------------------------

    def notify(self) -> None:
        """Wakes the readers, so that they check again what they wait for."""
        self._changed.set()
        while self._listeners:
            try:
                listeners = list(self._listeners.values())
            except RuntimeError:  # a finalizer removed one meanwhile
                continue
            for listener in listeners:
                listener()
            break

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Registers a listener, called on any thread when there are new parts or the end, and once
        now. Returns a function that removes it, which any thread or finalizer may call, repeatedly.
        """
        key = object()
        listeners = self._listeners
        listeners[key] = listener
        listener()

        def remove() -> None:
            listeners.pop(key, None)

        if self.done:  # perhaps after `end()` has cleared them
            remove()
        return remove

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` returns True, which is called again after each change."""
        self._changed.wait_for(ready)

    def wait(self) -> None:
        """Waits for the end."""
        self._changed.wait_for(lambda: self.done)

    def result(self) -> Reply:
        """Returns the reply, after the end.

        Raises:
            Error: it failed before its first token.
            InvalidRequest: it has not ended.
        """
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise InvalidRequest(
                "the reply has not ended, expected its end: wait() waits for it, follow() reads it"
            )
        return self.reply


class Cursor:
    """The place of one reader in a log.

    Args:
        log: the log.
        whole: whether a continued reply is read from its start.
    """

    def __init__(self, log: PartsLog, whole: bool = True) -> None:
        self.log = log
        self._before = whole
        self._late, self._node = log._late  # `_late`: merged parts that are not read yet

    @property
    def has_parts(self) -> bool:
        """Whether `take()` returns parts."""
        if self._node.following is not None or self._late:
            return True
        return self._before and bool(self.log.before)

    def take(self) -> list[Part]:
        """Returns the parts since the last call, without waiting."""
        self._node, parts = _after(self._node)
        if self._late:
            parts = [*merged(self.log._merged[: self._late]), *parts]
            self._late = 0
        if self._before and (parts or self.log.before):
            self._before = False
            parts = [*self.log.before, *parts]
        return parts


def _after(node: _Node) -> tuple[_Node, list[Part]]:
    """Returns the last node and the parts that follow `node`."""
    parts: list[Part] = []
    while (following := node.following) is not None:
        node = following
        assert node.part is not None
        parts.append(node.part)
    return node, parts


def merged(parts: Iterable[Part]) -> list[Part]:
    """Joins successive deltas of one kind and choice. Of the reports of progress the last stays."""
    progress: Progress | None = None
    runs: list[list[Delta]] = []
    current: dict[int, list[Delta]] = {}  # by choice
    for part in parts:
        if isinstance(part, Progress):
            progress = part
            continue
        run = current.get(part.choice)
        if run is None or run[0].kind != part.kind:
            run = current[part.choice] = []
            runs.append(run)
        run.append(part)
    first: list[Part] = [] if progress is None else [progress]
    return first + [_joined(run) for run in runs]


def _joined(run: Sequence[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    return Delta(
        run[0].kind,
        "".join([delta.text for delta in run]),
        tuple(chain.from_iterable([delta.token_ids for delta in run])),
        tuple(chain.from_iterable([delta.logprobs for delta in run])),
        run[0].choice,
        run[-1].seconds,
    )
