"""Engine handles of recent conversations, found by the tokens that they hold.

A request gets a `Reservation`. If a handle holds nothing that the request drops, the request
extends it; otherwise, or while another request extends it, the request gets a fork, which shares
its pages.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lmchat.conversations.shared_cache import SharedCache
from lmchat.store.turns import common_prefix
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
    stay, whatever becomes of a generation that extends the handle. The first reply that was
    generated here begins after `opening` tokens. `users` counts the reservations that refer to it,
    `busy` is whether one extends it.
    """

    handle: Handle
    owner: str
    token_ids: array[int]
    computed: int = 0
    stable: int = 0
    opening: int = 0
    users: int = 0
    busy: bool = False
    dropped: bool = False


@dataclass(eq=False)
class Reservation:
    """What a request uses: the first `prefix` tokens of `source`, which it extends or forks.

    `held` of them have KV. `own` is the handle that it generates with, once it has begun.
    `opening` is that of the source if they share a reply, else the length of the prompt.
    """

    owner: str
    token_ids: array[int]
    source: HeldHandle | None = None
    extends: bool = False
    prefix: int = 0
    held: int = 0
    own: HeldHandle | None = None
    opening: int = 0

    @property
    def continues(self) -> bool:
        """Whether it continues a conversation that has KV: it shares a reply with the source, not
        only the first tokens of the template."""
        return self.held > 0 and self.prefix > self.opening


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

    def reserve(self, owner: str, token_ids: Sequence[int]) -> Reservation:
        """Returns a reservation of the handle that has the longest prefix of a prompt with KV. Each
        one ends with `finish()` or `abandon()`."""
        reservation = Reservation(owner, array("i", token_ids), opening=len(token_ids))
        with self._lock:
            self._idle.expire()
            rank = (0, False, 0)
            for held in [*self._idle.of(owner), *self._busy.get(owner, ())]:
                prefix = common_prefix(held.token_ids, reservation.token_ids)
                if held.busy:
                    prefix = min(prefix, held.stable)
                extends = not held.busy and not held.users and prefix >= held.computed
                found = (min(prefix, max(held.computed, held.stable)), extends, -held.computed)
                if found > rank:
                    rank = found
                    reservation.source, reservation.extends, reservation.prefix = (
                        held,
                        extends,
                        prefix,
                    )
            source = reservation.source
            if source is not None:
                reservation.held = min(reservation.prefix, source.computed)
                if reservation.prefix > source.opening:
                    reservation.opening = source.opening
                source.users += 1
                if reservation.extends:
                    self._idle.remove(source)
                    self._busy.setdefault(owner, []).append(source)
                    source.busy, source.stable = True, reservation.prefix
        return reservation

    def begin(self, reservation: Reservation) -> tuple[Handle, int]:
        """Returns the handle to generate with, and how many of its tokens stay. The caller then
        makes the handle's sequence the reservation's prompt."""
        with self._lock:
            source = reservation.source
            if source is not None and reservation.extends:
                own = source
            else:
                if source is None:
                    handle = self._core.open(reservation.owner, RETENTION_CONVERSATION)
                else:
                    handle = source.handle.fork(RETENTION_CONVERSATION, wait=False)
                    self._end_use(source)
                own = HeldHandle(
                    handle, reservation.owner, reservation.token_ids, users=1, busy=True
                )
                own.computed = reservation.held
                self._busy.setdefault(reservation.owner, []).append(own)
            own.computed = min(own.computed, reservation.prefix)
            own.token_ids, own.stable = reservation.token_ids, len(reservation.token_ids)
            own.opening = reservation.opening
            reservation.own = own
        return own.handle, reservation.prefix

    def lost(self, reservation: Reservation) -> None:
        """Records that the engine has closed the reservation's handle. It has none then."""
        with self._lock:
            for held in (reservation.own, reservation.source):
                if held is not None:
                    self._idle.remove(held)
                    self._drop(held)
            self._release(reservation)
            reservation.source = reservation.own = None
            reservation.extends, reservation.prefix, reservation.held = False, 0, 0
            reservation.opening = len(reservation.token_ids)

    def finish(self, reservation: Reservation, reply: Sequence[int], computed: int) -> None:
        """Ends a reservation whose handle holds the prompt and `reply`; the first `computed` tokens
        have KV."""
        with self._lock:
            own = reservation.own
            if own is not None:
                own.token_ids.extend(reply)
                own.computed = min(computed, len(own.token_ids))
                own.stable = own.computed
            self._release(reservation)

    def abandon(self, reservation: Reservation) -> None:
        """Ends a reservation whose request did not reach the engine, or failed there."""
        with self._lock:
            own = reservation.own
            if own is not None:
                del own.token_ids[reservation.prefix :]
                own.computed = own.stable = min(own.computed, reservation.prefix)
            self._release(reservation)

    def close(self) -> None:
        """Closes all handles, those in use when their reservations end."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _release(self, reservation: Reservation) -> None:
        """Ends the use of a reservation's handle. The caller holds the lock."""
        held = reservation.own or reservation.source
        if held is None:
            return
        if reservation.own is not None or reservation.extends:
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
