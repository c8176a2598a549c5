"""What a session is, apart from what it is doing, and what a store of sessions has to promise.

A store is used like this: `begin()` takes the session's lease and keeps what a turn starts from;
`journal()` keeps tokens before anybody sees them; `finish()` acknowledges the turn; `release()`
gives the lease back. Everything else that changes a session is one `change()`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

from lmchat.errors import Error, InvalidRequest
from lmchat.store.prefixes import SharedPrefix
from lmchat.store.turns import Turn, TurnTree

MAX_NAME = 200  # characters


def now() -> datetime:
    """The moment, with its zone."""
    return datetime.now(timezone.utc)


@dataclass
class SessionRecord:
    """What a session is, apart from what it is doing: its turns and its settings.

    `leaf` is the last turn of the current branch. `created` also is the date that templates see, so
    that a past never changes at midnight. `model` is what was opened (a folder or a hub name),
    `fingerprint` the core's for keys and values, `tokenizer` and `template` digests of those two,
    with which the session was last used; empty before its first turn. `imported` says that all
    these are an archive's words: nobody has used the session here yet. `revision` is the store's:
    it rises with every change, so a writer that has not seen the last one is refused.

    Until the next turn, `unanswered` is a question whose process ended before the first token of
    its reply, and `notices` are what that turn's reply has to tell.
    """

    name: str
    owner: str
    history: str  # "keep" | "template"
    settings: dict[str, Any] = field(default_factory=dict)
    template_variables: dict[str, Any] = field(default_factory=dict)
    tree: TurnTree = field(default_factory=TurnTree)
    leaf: int | None = None
    pinned: bool = False
    created: datetime = field(default_factory=now)
    last_used: datetime = field(default_factory=now)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    own_title: str = ""  # given by the user; empty: see `title`
    tags: tuple[str, ...] = ()
    overflow: str = "refuse"  # | "drop"
    adapter: str = ""
    model: str = ""
    fingerprint: str = ""
    tokenizer: str = ""
    template: str = ""
    imported: bool = False
    revision: int = 0
    unanswered: str = ""
    notices: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its own, else the beginning of the first user message; empty before it."""
        if self.own_title:
            return self.own_title
        for turn in self.tree.path(self.leaf):
            if turn.role == "user":
                return shortened(turn.text)
        return ""


def shortened(text: str) -> str:
    """The beginning of a text in one line, at most 60 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:59] + "…"


@dataclass(frozen=True)
class Summary:
    """What a list of sessions shows of one, read without its turns. `turns` are the current
    branch's questions, `tokens` its transcript's; a store that outlives the process counts the
    reply in its journal too. `busy` names who generates on it now."""

    id: str
    name: str
    owner: str
    title: str
    tags: tuple[str, ...]
    turns: int
    tokens: int
    pinned: bool
    created: datetime
    last_used: datetime
    model: str
    fingerprint: str
    busy: str = ""
    snippet: str = ""  # of a search: where it was found


@dataclass(frozen=True)
class TurnStart:
    """What a generation starts from: the first `keep` tokens of the transcript of `parent`, then
    the tokens of `user` (a new turn, kept with the reply), or of the reply `extends` that goes on.

    `reply_id` is the id the reply's turn will have; with `extends` and `reply_id` equal it grows in
    place. `settings` are all that is needed to generate it again, the seed and attempt among them.
    `past` are new turns, parents first, that a rewrite of the conversation makes: `parent` is one
    of them, and they are kept with the reply.
    """

    parent: int | None
    keep: int
    reply_id: int
    settings: Mapping[str, Any]
    user: Turn | None = None
    extends: int | None = None
    past: tuple[Turn, ...] = ()

    def is_kept(self, tree: TurnTree) -> bool:
        """Whether the turn is in the tree already, and only its journal was not emptied."""
        if self.reply_id not in tree:
            return False
        reply = tree.get(self.reply_id)
        return self.extends != self.reply_id or reply.length - reply.stopped != self.keep


@dataclass(frozen=True)
class Lease:
    """The right to write one turn of a session. `fencing_token` rises with every
    lease of the session."""

    session: str
    fencing_token: int


@dataclass(frozen=True)
class JournalEntry:
    """A generation that did not end: what it started from and the tokens that were journalled.

    `damage` says what could not be read, empty when all could: the tokens are those before it, and
    `start` is None where it is damaged itself.
    """

    start: TurnStart | None
    token_ids: tuple[int, ...]
    damage: str = ""


class Stale(Error):
    """The record is not the session's newest state: `refresh()` it and plan anew. Of `journal()`,
    `leases` are those that are not the newest of their sessions."""

    def __init__(
        self, message: str = "the session has changed", leases: Iterable[Lease] = ()
    ) -> None:
        super().__init__(message)
        self.leases = tuple(leases)


class Store(Protocol):
    """Keeps sessions. Any thread. Every method raises StoreError when it cannot read or write,
    and then has changed nothing."""

    def find(self, owner: str, name: str) -> SessionRecord | None:
        """The session with its turns, None when there is none. A store within the process gives
        the same object each time."""

    def add(self, record: SessionRecord) -> None:
        """Keeps a new session with its turns; InvalidRequest when the name is taken or no name."""

    def add_numbered(self, record: SessionRecord) -> None:
        """As `add()`, under the next free name of "chat-1", "chat-2"..."""

    def refresh(self, record: SessionRecord) -> bool:
        """Takes over what others changed since; whether there was something. NotFound when the
        session was deleted."""

    def rename(self, record: SessionRecord, name: str) -> None:
        """Moves it to another name; InvalidRequest when that is taken, NotFound."""

    def change(self, record: SessionRecord, turns: Sequence[Turn] = ()) -> None:
        """Keeps the record's fields as they are now, and `turns` that are new or changed, in one
        durable transaction. Raises Stale, SessionBusy while another process generates, NotFound."""

    def remove(self, record: SessionRecord) -> None:
        """Deletes the session; NotFound when it is gone, SessionBusy while another process
        generates on it."""

    def records(self, owner: str | None = None) -> list[SessionRecord]:
        """All sessions with their turns, or an owner's, the last used first."""

    def summaries(
        self,
        owner: str | None = None,
        *,
        search: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
    ) -> list[Summary]:
        """What a list shows, the last used first; of a `search` the best first. A search finds
        words (prefixes with `*`) of messages, titles and names."""

    def common(self, owner: str, token_ids: Sequence[int]) -> SharedPrefix:
        """What a transcript shares with those of the owner's sessions, generations that did not
        end among them. Takes about as long as the transcript is, however many sessions there
        are."""

    # --- one turn ------------------------------------------------------------------------------

    def begin(self, record: SessionRecord, start: TurnStart) -> Lease:
        """Takes the session's lease and durably keeps the start. SessionBusy names a living owner
        in another process; Stale, also while the journal of one that died is there: `recover()`
        it first; NotFound. A lease of this process's own is taken over."""

    def journal(self, tokens: Iterable[tuple[Lease, Sequence[int]]]) -> None:
        """Appends tokens to the journals of several turns in one transaction that survives the
        death of the process. Raises Stale for a lease that is not the session's newest one, and
        then has kept the others."""

    def sync(self) -> None:
        """What was journalled survives the death of the machine when this returns."""

    def finish(self, lease: Lease, record: SessionRecord, turns: Sequence[Turn]) -> None:
        """Durably keeps `turns` and the record's fields and empties the journal: the turn is
        acknowledged. The lease stays until `release()`. Raises Stale."""

    def release(self, lease: Lease) -> None:
        """Gives the lease back; a journal that is still there is dropped with it (nothing came of
        the turn). No error when it was taken over."""

    def unfinished(self, record: SessionRecord, *, living: bool = False) -> JournalEntry | None:
        """What a process that died, or an earlier run, left in the session's journal; None while
        its owner lives, unless `living`. `finish()` of a lease from `recover()` empties it."""

    def recover(self, record: SessionRecord) -> Lease:
        """Takes the lease of a session whose owner died, leaving its journal as it is. SessionBusy
        while the owner lives."""

    # --- small facts ----------------------------------------------------------------------------

    def note(self, key: str, value: Any) -> None:
        """Keeps a JSON value that costs nothing to lose (measured speeds, say)."""

    def noted(self, key: str) -> Any:
        """The value, None when there is none."""

    def close(self) -> None:
        """Releases what this process holds. Idempotent."""


def check_name(name: object) -> None:
    """InvalidRequest unless `name` is a printable text that a user can type again."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME
        or name != name.strip()
        or not name.isprintable()
    ):
        raise InvalidRequest(
            f"session name is {name!r}, expected 1 to {MAX_NAME} printable characters without "
            "spaces around them"
        )


def check_tags(tags: object) -> tuple[str, ...]:
    """The tags, without repeats; InvalidRequest unless they are short printable texts without
    spaces around them."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise InvalidRequest(f"tags is {tags!r}, expected a list of texts")
    found = tuple(dict.fromkeys(tags))
    for tag in found:
        if not isinstance(tag, str) or not 1 <= len(tag) <= 64 or tag != tag.strip():
            raise InvalidRequest(f"tag is {tag!r}, expected 1 to 64 characters, no spaces around")
        if not tag.isprintable():
            raise InvalidRequest(f"tag is {tag!r}, expected printable characters")
    return found


def check_mapping(what: str, given: object) -> dict[str, Any]:
    """A copy of `given`; InvalidRequest unless it is a mapping with text keys, or None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InvalidRequest(f"{what} is {given!r}, expected a mapping from names to values")
    return dict(given)
