"""The requests of one server: those with keys, and those whose clients are owed a reply."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from lmchat.server.retries import keys
from lmchat.server.retries.entry import SETTLE_SECONDS, Entry
from lmchat.server.retries.turn import SECONDS
from lmchat.sessions.session import Session

MOST_KEYS = 1000  # of one owner


class Entries:
    """The requests of all owners. Used on the event loop's thread; any thread may call `live()`."""

    def __init__(self) -> None:
        self._keyed: dict[str, OrderedDict[tuple[str, str], Entry]] = {}
        self._live: dict[tuple[str, int], Entry] = {}
        self._settling: dict[Entry, asyncio.TimerHandle] = {}
        self._is_ending = False

    def add(self, entry: Entry) -> Entry:
        """Makes an entry known by its session and token. Returns it."""
        entry.settled = self._settle
        oldest = time.time() - SECONDS
        self._live = {
            key: one
            for key, one in self._live.items()
            if one.clients
            or one in self._settling
            or not (one.is_settled or (one.at < oldest and _has_ended(one)))
        }
        if entry.session is not None and entry.token is not None:
            self._live[entry.session.id, entry.token] = entry
        return entry

    def _settle(self, entry: Entry) -> None:
        """Stores soon that a client has the reply."""
        if self._is_ending:
            entry.mark_settled()
        elif entry not in self._settling:
            later = asyncio.get_running_loop().call_later
            self._settling[entry] = later(SETTLE_SECONDS, self._settled, entry)

    def _settled(self, entry: Entry) -> None:
        del self._settling[entry]
        entry.mark_settled()

    def flush(self) -> None:
        """Stores what clients have got. From now on that is stored at once: the server ends."""
        self._is_ending = True
        for entry, timer in list(self._settling.items()):
            timer.cancel()
            self._settled(entry)

    def live(self, session: Session, token: int) -> Entry | None:
        """Returns the entry of the request whose turn has this lease; None: this server does not
        answer it, or the store knows that its client has the reply."""
        return self._live.get((session.id, token))

    def enter(self, owner: str, scope: str, key: str, digest: str) -> tuple[Entry, bool]:
        """Returns the entry of a key, and whether it is new.

        Args:
            owner: the owner.
            scope: what the key is unique in, such as the id of a session.
            key: the key.
            digest: digest of the request.

        Raises:
            HttpError: the key was used with another body.
        """
        entries = self._keyed.setdefault(owner, OrderedDict())
        oldest = time.time() - keys.SECONDS
        while entries and (len(entries) >= MOST_KEYS or _first(entries).at < oldest):
            entries.popitem(last=False)
        found = entries.get((scope, key))
        if found is None:
            entries[scope, key] = found = Entry(digest)
            return found, True
        keys.check(found.digest, digest)
        return found, False

    def forget(self, owner: str, scope: str, key: str, entry: Entry) -> None:
        """Removes the entry of a request that was refused or whose reply is not to be had, so that
        it can be repeated. A later entry with the key stays."""
        entries = self._keyed.get(owner, OrderedDict())
        if entries.get((scope, key)) is entry:
            del entries[scope, key]


def _first(entries: OrderedDict[tuple[str, str], Entry]) -> Entry:
    return next(iter(entries.values()))


def _has_ended(entry: Entry) -> bool:
    return entry.answer is None or entry.answer.done
