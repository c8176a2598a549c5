"""Engine handles of recent conversations, found by the tokens that they hold.

A request gets a `Lease`. If a handle holds nothing that the request drops, the request extends it;
otherwise, or while another request extends it, the request gets a fork, which shares its pages.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lmchat.conversations.shared_cache import SharedCache
from turbomind import Engine, Handle

RETENTION_CONVERSATION = 0.5
"""Retention priority of a conversation without a session: above other stateless requests, which
have 0, and below sessions, which have 1."""

MAX_HANDLES = 256
HANDLE_SECONDS = 3600.0
"""Bounds of the handles that are kept: number, and seconds since the last use. A third one is
their tokens in all: not more than the KV cache holds."""


@dataclass(eq=False)
class HeldHandle:
    """A handle and its tokens.

    The first `computed` tokens have KV, unless the engine has evicted it. The first `stable` ones
    stay, whatever becomes of a generation that extends the handle. `users` counts the leases that
    refer to it, `busy` is whether one extends it.
    """

    handle: Handle
    owner: str
    token_ids: array[int]
    computed: int = 0
    stable: int = 0
    users: int = 0
    busy: bool = False
    dropped: bool = False


@dataclass(eq=False)
class Lease:
    """What a request uses: the first `prefix` tokens of `source`, which it extends or forks.

    `held` of them have KV. `own` is the handle that it generates with, once it has begun.
    """

    owner: str
    token_ids: array[int]
    source: HeldHandle | None = None
    extends: bool = False
    prefix: int = 0
    held: int = 0
    own: HeldHandle | None = None


class HandlePool:
    """The handles of recent conversations. Any thread may call it; no method waits for the engine.

    Args:
        core: the engine.
        most_tokens: bound of the tokens of all handles.
    """

    def __init__(self, core: Engine, most_tokens: int) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._idle: SharedCache[HeldHandle] = SharedCache(
            MAX_HANDLES, max(1, most_tokens), HANDLE_SECONDS, self._drop
        )
        self._busy: dict[str, list[HeldHandle]] = {}  # by owner
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle) + sum(map(len, self._busy.values()))

    def reserve(self, owner: str, token_ids: Sequence[int]) -> Lease:
        """Returns a lease of the handle that has the longest prefix of a prompt with KV. Each lease
        ends with `finish()` or `abandon()`."""
        lease = Lease(owner, array("i", token_ids))
        with self._lock:
            self._idle.expire()
            rank = (0, False, 0)
            for held in [*self._idle.of(owner), *self._busy.get(owner, ())]:
                prefix = _common(held.token_ids, lease.token_ids)
                if held.busy:
                    prefix = min(prefix, held.stable)
                extends = not held.busy and not held.users and prefix >= held.computed
                found = (min(prefix, max(held.computed, held.stable)), extends, -held.computed)
                if found > rank:
                    rank = found
                    lease.source, lease.extends, lease.prefix = held, extends, prefix
            source = lease.source
            if source is not None:
                lease.held = min(lease.prefix, source.computed)
                source.users += 1
                if lease.extends:
                    self._idle.remove(source)
                    self._busy.setdefault(owner, []).append(source)
                    source.busy, source.stable = True, lease.prefix
        return lease

    def begin(self, lease: Lease) -> tuple[Handle, int]:
        """Returns the handle to generate with, and how many of its tokens stay. The caller then
        makes the handle's sequence the lease's prompt."""
        with self._lock:
            source = lease.source
            if source is not None and lease.extends:
                own = source
            else:
                if source is None:
                    handle = self._core.open(lease.owner, RETENTION_CONVERSATION)
                else:
                    handle = source.handle.fork(RETENTION_CONVERSATION, wait=False)
                    self._end_use(source)
                own = HeldHandle(handle, lease.owner, lease.token_ids, users=1, busy=True)
                own.computed = lease.held
                self._busy.setdefault(lease.owner, []).append(own)
            own.computed = min(own.computed, lease.prefix)
            own.token_ids, own.stable = lease.token_ids, len(lease.token_ids)
            lease.own = own
        return own.handle, lease.prefix

    def lost(self, lease: Lease) -> None:
        """Records that the engine has closed the lease's handle. The lease has none then."""
        with self._lock:
            for held in (lease.own, lease.source):
                if held is not None:
                    held.dropped = True
                    self._idle.remove(held)
            self._release(lease)
            lease.source = lease.own = None
            lease.extends, lease.prefix, lease.held = False, 0, 0

    def finish(self, lease: Lease, reply: Sequence[int], computed: int) -> None:
        """Ends a lease whose handle holds the prompt and `reply`; the first `computed` tokens have
        KV."""
        with self._lock:
            own = lease.own
            if own is not None:
                own.token_ids.extend(reply)
                own.computed = min(computed, len(own.token_ids))
                own.stable = own.computed
            self._release(lease)

    def abandon(self, lease: Lease) -> None:
        """Ends a lease whose request did not reach the engine, or failed there."""
        with self._lock:
            own = lease.own
            if own is not None:
                del own.token_ids[lease.prefix :]
                own.computed = own.stable = min(own.computed, lease.prefix)
            self._release(lease)

    def close(self) -> None:
        """Closes all handles, those in use when their leases end."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _release(self, lease: Lease) -> None:
        """Ends the use of a lease's handle. The caller holds the lock."""
        held = lease.own or lease.source
        if held is None:
            return
        if lease.own is not None or lease.extends:
            held.busy = False
            running = self._busy[held.owner]
            running.remove(held)
            if not running:
                del self._busy[held.owner]
        self._end_use(held)

    def _end_use(self, held: HeldHandle) -> None:
        held.users -= 1
        held.dropped = held.dropped or self._closed
        if not held.dropped and not held.busy:
            self._idle.put(held.owner, held, 1 + len(held.token_ids))
        elif held.dropped and not held.users:
            held.handle.close()

    def _drop(self, held: HeldHandle) -> None:
        held.dropped = True
        if not held.users:
            held.handle.close()


def _common(one: array[int], other: array[int]) -> int:
    """Returns the length of the common prefix, in tokens."""
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
