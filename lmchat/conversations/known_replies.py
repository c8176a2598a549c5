"""The replies that this process has produced, found by their text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from lmchat.conversations.shared_cache import SharedCache
from lmchat.store.turns import Turn

MAX_REPLIES = 16_384
MAX_REPLY_BYTES = 64 << 20
REPLY_SECONDS = 24 * 3600.0
"""Bounds of the replies that are kept: number, bytes in all, seconds since the last use."""

_SAME_TEXT = 16  # replies of one text and owner


@dataclass(frozen=True, eq=False)
class KnownReply:
    """A reply, after which messages it was produced, and the time that its prompt showed."""

    turn: Turn
    past: bytes
    now: datetime

    @property
    def key(self) -> str:
        """The text by which it is found: white space at the ends of a reply does not count."""
        return self.turn.text.strip()

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        turn = self.turn
        return 1024 + 8 * len(turn.text) + 8 * len(turn.reasoning) + 40 * len(turn.token_ids)


class KnownReplies:
    """Replies by owner and text. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cache: SharedCache[KnownReply] = SharedCache(
            MAX_REPLIES, MAX_REPLY_BYTES, REPLY_SECONDS, self._forget
        )
        self._by_text: dict[tuple[str, str], list[KnownReply]] = {}
        self._owners: dict[KnownReply, str] = {}

    def __len__(self) -> int:
        return len(self._cache)

    def add(self, owner: str, reply: KnownReply) -> None:
        """Adds a reply. It replaces one with the same tokens after the same messages."""
        with self._lock:
            known = self._by_text.setdefault((owner, reply.key), [])
            same = [one for one in known if one.past == reply.past]
            surplus = [one for one in same if one.turn.token_ids == reply.turn.token_ids]
            for one in surplus or known[: len(known) - _SAME_TEXT + 1]:
                self._cache.remove(one)
                self._forget(one)
            self._by_text.setdefault((owner, reply.key), []).append(reply)
            self._owners[reply] = owner
            self._cache.put(owner, reply, reply.size)

    def find(
        self, owner: str, past: Callable[[], bytes], text: str, reasoning: str | None
    ) -> KnownReply | None:
        """Returns the reply with this text: the one after the same messages if there is one, else
        the last one.

        Args:
            owner: the owner.
            past: returns the digest of the messages before it.
            text: its text; white space at the ends does not count.
            reasoning: its reasoning; None: any.
        """
        wanted = None if reasoning is None else reasoning.strip()
        with self._lock:
            found = [
                one
                for one in self._by_text.get((owner, text.strip()), ())
                if wanted is None or one.turn.reasoning.strip() == wanted
            ]
            if not found:
                return None
            digest = past()
            best = next((one for one in reversed(found) if one.past == digest), None)
            if best is None:
                # Without a text to recognize it by, only its own place tells what it was.
                best = found[-1] if text.strip() or wanted else None
            if best is not None:
                self._cache.put(owner, best, best.size)
            return best

    def _forget(self, reply: KnownReply) -> None:
        key = (self._owners.pop(reply), reply.key)
        known = self._by_text[key]
        known.remove(reply)
        if not known:
            del self._by_text[key]
