"""Which engine handles hold the keys and values of which branch of a session.

A session has one handle per branch it was on lately, so that going back computes nothing again.
Nothing is sent to the engine for undo, edit or switch: the next generation says in one message what
its handle's sequence becomes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmchat.kv.lower_tiers import LowerTiers
from lmchat.store.prefixes import equal
from lmchat.store.turns import Turn, TurnTree, transcript
from turbomind import Handle

RETENTION_BRANCH = 0.25
RETENTION_SESSION = 1.0
RETENTION_PINNED = 2.0
"""How much the pages of an old branch, of an idle session and of a pinned one are worth keeping.
Pages of stateless requests are worth 0, and of equal worth the ones not used for longest go."""

MAX_HANDLES = 8  # of one session; a handle is the token ids and some bytes per page


@dataclass
class CachedHandle:
    """A handle whose tokens begin with the first `length` of the transcript of `turn`; of them the
    first `computed` have keys and values, as long as the engine's memory does not run short."""

    handle: Handle
    turn: int | None = None
    length: int = 0
    computed: int = 0
    used: int = 0

    def holds(self, turn: Turn, length: int, computed: int) -> None:
        """A generation on it has ended as `turn`; it has `length` tokens, `computed` of them with
        keys and values."""
        self.turn, self.length = turn.id, min(length, turn.length)
        self.computed = min(computed, self.length)


class HandleCache:
    """The handles of one session. The caller locks."""

    def __init__(
        self, pages: LowerTiers, salt: str, retention_priority: float = RETENTION_SESSION
    ) -> None:
        self._pages = pages
        self._salt = salt
        self._retention_priority = retention_priority
        self._held: list[CachedHandle] = []
        self._clock = itertools.count(1)

    @property
    def retention_priority(self) -> float:
        """Of the current branch."""
        return self._retention_priority

    def set_retention_priority(self, value: float) -> Handle | None:
        """From now on. Returns the handle that has yet to be told, if there is one."""
        self._retention_priority = value
        newest = max(self._held, key=lambda held: held.used, default=None)
        return None if newest is None else newest.handle

    def take(
        self, tree: TurnTree, parent: int | None, keep: int, suffix: Sequence[int]
    ) -> tuple[CachedHandle, int, list[int]]:
        """A handle to generate on from the first `keep` tokens of the parent's transcript and
        `suffix`; how many of its tokens stay, and what is to be appended.

        Another branch that the handle holds is left to a copy, which shares its pages.
        """
        best, common = self._best(tree, parent, keep, suffix)
        if best is None:
            best = CachedHandle(self._pages.open(self._salt, self._retention_priority))
            self._held.append(best)
        if best.computed > common:
            copy = best.handle.fork(retention_priority=RETENTION_BRANCH, wait=False)
            self._held.append(replace(best, handle=copy))
        best.turn, best.length, best.used = parent, min(common, keep), next(self._clock)
        best.computed = min(best.computed, common)
        self._close_oldest()
        if common >= keep:
            return best, common, list(suffix[common - keep :])
        return best, common, [*tree.token_ids(parent)[common:keep], *suffix]

    def fits(self, tree: TurnTree, leaf: int | None, length: int) -> Handle | None:
        """A handle with the whole transcript of `leaf`."""
        best, common = self._best(tree, leaf, length, ())
        return best.handle if best is not None and common == length else None

    def adopt(self, handle: Handle, leaf: int | None, length: int) -> None:
        """Takes a handle with the transcript of `leaf`, none of it computed."""
        self._held.append(CachedHandle(handle, leaf, length, 0, next(self._clock)))
        self._close_oldest()

    def live_tokens(self, tree: TurnTree, parent: int | None, keep: int) -> int:
        """Tokens of the parent's transcript whose keys and values some handle has."""
        best, common = self._best(tree, parent, keep, ())
        return 0 if best is None else min(best.computed, common)

    def fork(self, tree: TurnTree, leaf: int | None, length: int) -> HandleCache:
        """The same for another session that begins with this one's turns up to `leaf`."""
        kept = HandleCache(self._pages, self._salt)
        best, common = self._best(tree, leaf, length, ())
        if best is not None and common > 0:
            copy = best.handle.fork(retention_priority=RETENTION_SESSION, wait=False)
            computed = min(best.computed, common)
            kept._held.append(CachedHandle(copy, leaf, common, computed, next(kept._clock)))
        return kept

    def forget(self, held: CachedHandle) -> None:
        """The engine does not know the handle any more."""
        if held in self._held:
            self._held.remove(held)

    def drop(self, held: CachedHandle) -> None:
        """Gives up a handle that holds nothing of the session's."""
        self.forget(held)
        self._pages.close(held.handle, save=False)

    def close(self, save: bool = True) -> None:
        """Gives up all handles; full pages stay cached while there is room, and what is not below
        yet goes there unless nobody will want it (`save` off)."""
        for held in self._held:
            self._pages.close(held.handle, save)
        self._held = []

    def _best(
        self, tree: TurnTree, parent: int | None, keep: int, suffix: Sequence[int]
    ) -> tuple[CachedHandle | None, int]:
        best: CachedHandle | None = None
        found, most = 0, (0, 0)
        for held in self._held:
            common = _common(tree, held, parent, keep, suffix)
            computed = min(common, held.computed)
            rank = (computed, computed - held.computed)  # of equal ones, what loses least
            if best is None or rank > most:
                best, found, most = held, common, rank
        return best, found

    def _close_oldest(self) -> None:
        while len(self._held) > MAX_HANDLES:
            oldest = min(self._held, key=lambda held: held.used)
            self._held.remove(oldest)
            self._pages.close(oldest.handle)


def _common(
    tree: TurnTree, held: CachedHandle, parent: int | None, keep: int, suffix: Sequence[int]
) -> int:
    """Length of the longest common beginning of what `held` holds and what is wanted."""
    if held.turn is not None and held.turn not in tree:  # of a rewrite that is still being tried
        return 0
    if held.turn == parent:
        if held.length <= keep:
            return held.length
        return keep + equal(tree.token_ids(parent)[keep : held.length], suffix)
    ours, theirs = tree.path(parent), tree.path(held.turn)
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared].id == theirs[shared].id:
        shared += 1
    least = ours[shared - 1].length if shared else 0
    least = min([least, held.length, keep, *(t.keep for t in ours[shared:] + theirs[shared:])])
    wanted = [*transcript(ours)[least:keep], *suffix]
    return least + equal(transcript(theirs)[least : held.length], wanted)
