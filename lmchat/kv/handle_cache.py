"""The engine handles of a session, and the branch whose KV each of them holds.

A handle (SGLang: session) exists for each of the last branches, so that returning to one computes
nothing again. Undo, edit and switch send nothing to the engine: the next generation reports in one
message what its handle's sequence becomes.

Not here: pages in lower tiers (`lower_tiers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmchat.kv.lower_tiers import LowerTiers
from lmchat.store.turns import Turn, TurnTree, common_prefix, transcript
from turbomind import Handle

RETENTION_BRANCH = 0.25
RETENTION_SESSION = 1.0
RETENTION_PINNED = 2.0
"""Retention priorities of an old branch, an idle session and a pinned one. Stateless requests have
0. The engine evicts the lowest first, and of equal ones the least recently used."""

MAX_HANDLES = 8  # per session; a handle costs its token ids and some bytes per page


@dataclass
class CachedHandle:
    """A handle and the prefix that it has in common with a transcript.

    Its first `length` tokens are those of the transcript of `turn`; `suffix` follows them, the
    tokens of a question that was not answered. The first `computed` tokens have KV, unless the
    engine has evicted it. `used` orders handles by their last use.
    """

    handle: Handle
    turn: int | None = None
    length: int = 0
    computed: int = 0
    used: int = 0
    suffix: tuple[int, ...] = ()

    def holds(self, turn: Turn, length: int, computed: int) -> None:
        """Records that a generation has ended as `turn`, with `length` tokens of which `computed`
        have KV."""
        self.turn, self.length, self.suffix = turn.id, min(length, turn.length), ()
        self.computed = min(computed, self.length)

    def holds_prompt(
        self, parent: int | None, prefix_length: int, suffix: Sequence[int], computed: int
    ) -> None:
        """Records that a generation was cancelled before its first token. Its prompt is the first
        `prefix_length` tokens of the transcript of `parent`, then `suffix`."""
        self.turn, self.length, self.suffix = parent, prefix_length, tuple(suffix)
        self.computed = computed


class HandleCache:
    """The handles of one session, at most MAX_HANDLES. The caller synchronizes calls.

    Args:
        pages: the engine's lower tiers, through which handles are opened and closed.
        salt: seed of the block hashes; sessions of one salt share pages.
        retention_priority: priority of the current branch's pages.
    """

    def __init__(
        self, pages: LowerTiers, salt: str, retention_priority: float = RETENTION_SESSION
    ) -> None:
        self._pages = pages
        self._salt = salt
        self._retention_priority = retention_priority
        self._handles: list[CachedHandle] = []
        self._clock = itertools.count(1)

    @property
    def retention_priority(self) -> float:
        """Retention priority of the current branch."""
        return self._retention_priority

    def set_retention_priority(self, value: float) -> Handle | None:
        """Sets the priority of the current branch. Returns the handle to apply it to, or None."""
        self._retention_priority = value
        newest = max(self._handles, key=lambda cached: cached.used, default=None)
        return None if newest is None else newest.handle

    def take(
        self, tree: TurnTree, parent: int | None, prefix_length: int, suffix: Sequence[int]
    ) -> tuple[CachedHandle, int, list[int]]:
        """Chooses the handle that has the longest prefix of the next prompt, or opens one.

        If the handle also holds another branch, that moves to a fork of the handle, which shares
        its pages.

        Args:
            tree: the session's turns.
            parent: the turn that the prompt starts from.
            prefix_length: tokens of the parent's transcript that the prompt starts with.
            suffix: the tokens that follow them.

        Returns:
            The handle, how many of its tokens stay, and the tokens to append.
        """
        best, common = self._best(tree, parent, prefix_length, suffix)
        if best is None:
            best = CachedHandle(self._pages.open(self._salt, self._retention_priority))
            self._handles.append(best)
        if best.computed > common:
            copy = best.handle.fork(retention_priority=RETENTION_BRANCH, wait=False)
            self._handles.append(replace(best, handle=copy))
        best.turn, best.length, best.used = parent, min(common, prefix_length), next(self._clock)
        best.computed, best.suffix = min(best.computed, common), ()
        self._close_oldest()
        if common >= prefix_length:
            return best, common, list(suffix[common - prefix_length :])
        return best, common, [*tree.token_ids(parent)[common:prefix_length], *suffix]

    def fits(self, tree: TurnTree, leaf: int | None, length: int) -> Handle | None:
        """Returns a handle that holds the transcript of `leaf`, all `length` tokens, or None."""
        best, common = self._best(tree, leaf, length, ())
        return best.handle if best is not None and common == length else None

    def adopt(self, handle: Handle, leaf: int | None, length: int) -> None:
        """Adds a handle that holds the transcript of `leaf` and no KV yet."""
        self._handles.append(CachedHandle(handle, leaf, length, 0, next(self._clock)))
        self._close_oldest()

    def live_tokens(self, tree: TurnTree, parent: int | None, prefix_length: int) -> int:
        """Returns how many tokens of the parent's transcript have their KV in some handle."""
        best, common = self._best(tree, parent, prefix_length, ())
        return 0 if best is None else min(best.computed, common)

    def fork(self, tree: TurnTree, leaf: int | None, length: int) -> HandleCache:
        """Returns the handles of a fork of the session at `leaf`, whose transcript has `length`
        tokens. The fork shares pages."""
        forked = HandleCache(self._pages, self._salt)
        best, common = self._best(tree, leaf, length, ())
        if best is not None and common > 0:
            copy = best.handle.fork(retention_priority=RETENTION_SESSION, wait=False)
            computed = min(best.computed, common)
            forked._handles.append(CachedHandle(copy, leaf, common, computed, next(forked._clock)))
        return forked

    def forget(self, cached: CachedHandle) -> None:
        """Removes a handle that the engine has already closed."""
        if cached in self._handles:
            self._handles.remove(cached)

    def drop(self, cached: CachedHandle) -> None:
        """Removes and closes a handle that holds nothing of the session."""
        self.forget(cached)
        self._pages.close(cached.handle, save=False)

    def close(self, save: bool = True) -> None:
        """Closes all handles. Full pages stay cached while there is room.

        Args:
            save: whether pages that no lower tier has yet are written there.
        """
        for cached in self._handles:
            self._pages.close(cached.handle, save)
        self._handles = []

    def _best(
        self, tree: TurnTree, parent: int | None, prefix_length: int, suffix: Sequence[int]
    ) -> tuple[CachedHandle | None, int]:
        best: CachedHandle | None = None
        found, most = 0, (0, 0)
        for cached in self._handles:
            common = _common(tree, cached, parent, prefix_length, suffix)
            computed = min(common, cached.computed)
            rank = (computed, computed - cached.computed)  # of equal ones, the one that loses least
            if best is None or rank > most:
                best, found, most = cached, common, rank
        return best, found

    def _close_oldest(self) -> None:
        while len(self._handles) > MAX_HANDLES:
            oldest = min(self._handles, key=lambda cached: cached.used)
            self._handles.remove(oldest)
            self._pages.close(oldest.handle)


def _common(
    tree: TurnTree,
    cached: CachedHandle,
    parent: int | None,
    prefix_length: int,
    suffix: Sequence[int],
) -> int:
    """Returns the length of the longest common prefix of the handle and the wanted prompt."""
    if (
        cached.turn is not None and cached.turn not in tree
    ):  # a turn of a rewrite that was not committed
        return 0
    if cached.turn == parent:
        if cached.length < prefix_length:
            return cached.length
        held = [*tree.token_ids(parent)[prefix_length : cached.length], *cached.suffix]
        return prefix_length + common_prefix(held, suffix)
    ours, theirs = tree.path(parent), tree.path(cached.turn)
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared].id == theirs[shared].id:
        shared += 1
    least = ours[shared - 1].length if shared else 0
    least = min(
        [
            least,
            cached.length,
            prefix_length,
            *(t.prefix_length for t in ours[shared:] + theirs[shared:]),
        ]
    )
    wanted = [*transcript(ours)[least:prefix_length], *suffix]
    held = [*transcript(theirs)[least : cached.length], *cached.suffix]
    return least + common_prefix(held, wanted)
