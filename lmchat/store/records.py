"""The values that a store reads and writes: sessions, starts of turns, leases and journals."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from lmchat.store.turns import Turn, TurnTree

SESSION_ID = "[0-9a-f]{32}"
"""Pattern of the id of a session, also for HAProxy (`lmchat deploy`)."""

LOCAL_OWNER = "local"
"""Owner of the terminal's sessions, and of requests without a key."""

_LAST_YEAR = datetime.max.year
_latest = datetime.min.replace(tzinfo=timezone.utc)  # what now() has returned
_latest_lock = threading.Lock()


def now() -> datetime:
    """Returns the current time in UTC, and a later one at each call of this process, also after
    the clock was set back."""
    global _latest
    with _latest_lock:
        _latest = max(datetime.now(timezone.utc), _latest + timedelta(microseconds=1))
        return _latest


def not_before(moment: datetime) -> None:
    """Makes `now()` return later times than `moment`, which a store has seen. One of the last year
    that a date can have is ignored."""
    global _latest
    if moment.year < _LAST_YEAR:
        with _latest_lock:
            _latest = max(_latest, moment)


@dataclass(frozen=True)
class SessionRecord:
    """The persistent state of a session: its turns and its settings. It is immutable.

    Attributes:
        name: unique among the sessions of its owner.
        owner: whose session it is; pages of KV are shared only within an owner.
        history: the rule for earlier turns, "append" or "template"; stores and archives call
            the first one "keep".
        settings: the session's own generation settings.
        template_variables: what the template gets beside the messages.
        tree: all turns, of all branches.
        leaf: id of the last turn of the current branch; None: the conversation is empty.
        pinned: whether its pages stay in memory before those of other idle sessions.
        created: also the date that templates see, so that a prompt never changes at midnight.
        last_used: end of the last turn.
        id: constant, also over renames.
        own_title: the title that the user gave; empty: see `title`.
        tags: in the order given, without repeats.
        metadata: texts by key, for the programs that use the session.
        overflow: what happens when a turn does not fit the context, "refuse" or "drop".
        adapter: not used yet.
        model: the model that was opened, a folder or a hub name; empty before the first turn.
        fingerprint: the engine's fingerprint of weights and arithmetic at the last turn.
        tokenizer: digest of the tokenizer at the last turn.
        template: digest of the chat template at the last turn.
        loading: the engine options that the model of the last turn was loaded with, as far as they
            change results: `sessions.model_identity.LOADING`.
        imported: whether the four fields before come from an archive, and no turn has been
            generated here yet.
        revision: rises with every change in the store, which refuses a writer that has not read
            the last one.
        unanswered: a question that was stopped, or whose process ended, before the first token of
            its reply; empty from the next turn on.
        unanswered_parts: lengths of the messages that `unanswered` is joined of; empty: it is one.
        notices: messages for the user that the next reply carries.
        keys: changes that generated nothing and whose requests had a key: digest and time by key.
    """

    name: str
    owner: str
    history: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tree: TurnTree = field(default_factory=TurnTree)
    leaf: int | None = None
    pinned: bool = False
    created: datetime = field(default_factory=now)
    last_used: datetime = field(default_factory=now)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    own_title: str = ""
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    overflow: str = "refuse"
    adapter: str = ""
    model: str = ""
    fingerprint: str = ""
    tokenizer: str = ""
    template: str = ""
    loading: Mapping[str, Any] = field(default_factory=dict)
    imported: bool = False
    revision: int = 0
    unanswered: str = ""
    unanswered_parts: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The title that the user gave, else the start of the first question, which may have been
        dropped from a full context; empty without one."""
        if self.own_title:
            return self.own_title
        path = self.tree.path(self.leaf)
        questions = (turn for turn in (*self.tree.dropped(path), *path) if turn.role == "user")
        first = next(questions, None)
        return "" if first is None else shortened(first.text)

    def changed(self, turns: Iterable[Turn] = (), **fields: Any) -> SessionRecord:
        """Returns a record with these turns added or replaced, and with new values of fields.

        Args:
            turns: parents first.
            fields: values by the names of fields. `unanswered` alone is one message.
        """
        if "unanswered" in fields:
            fields.setdefault("unanswered_parts", ())
        added = tuple(turns)
        tree = self.tree.with_turns(added) if added else self.tree
        return replace(self, **{"tree": tree, **fields})


def shortened(text: str) -> str:
    """Returns the start of a text in one line, at most 60 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:59] + "…"


HIDDEN_TAG = "responses"
"""Tag of sessions that programs made for themselves. Lists have them on request only."""


@dataclass(frozen=True)
class Summary:
    """One session in a list, read without its turns.

    `turns` counts the questions of the current branch, `tokens` its transcript; a store that
    outlives the process adds the reply in its journal. `busy` names another process that generates
    on the session now. `snippet` is the place that a search found. `revision` rises with every
    stored change of the session, by any process.
    """

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
    snippet: str = ""
    revision: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        path: the file.
        turns: turns of all branches.
        pages: pages, one per cache group.
        bytes: size of the file.
    """

    path: str
    turns: int
    pages: int
    bytes: int


@dataclass(frozen=True)
class TurnStart:
    """The start of a generation, persisted before its first token.

    The prompt is the first `prefix_length` tokens of the transcript of `parent`, then the tokens of
    `user` (a new turn) or of `extends` (a reply that is continued).

    Attributes:
        parent: id of the turn that the prompt follows.
        prefix_length: length of the reused prefix of the parent's transcript, in tokens.
        reply_id: id of the reply's turn; equal to `extends`, that turn grows in place.
        settings: all settings of the generation, the seed and the attempt among them: they are
            enough to generate the reply again.
        user: the question, persisted together with the reply.
        extends: id of the reply that is continued.
        past: turns of a rebuilt conversation, parents first, persisted together with the reply;
            `parent` is one of them.
        metadata: JSON values by key that the reply gets, beside those that a continued one has.
        keeps_question: whether the question becomes the session's unanswered one if the process
            dies before the first token.
    """

    parent: int | None
    prefix_length: int
    reply_id: int
    settings: Mapping[str, Any]
    user: Turn | None = None
    extends: int | None = None
    past: tuple[Turn, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    keeps_question: bool = True

    @property
    def new_metadata(self) -> Mapping[str, Any]:
        """Metadata of the question if it is new, else what the reply gets."""
        return self.metadata if self.user is None else self.user.metadata

    def is_stored(self, tree: TurnTree) -> bool:
        """Returns whether the tree has the reply already, so that its journal is obsolete."""
        if self.reply_id not in tree:
            return False
        reply = tree.get(self.reply_id)
        return self.extends != self.reply_id or reply.length - reply.stopped != self.prefix_length


AskedState = Literal["open", "left", "died", "settled"]
"""What became of a client's request: a client waits for its reply; the client has left without it;
the process that answered it has died; or the client has the reply, or has stopped it."""


@dataclass(frozen=True)
class TurnRequest:
    """The request of a client that the last turn of a session answers.

    Attributes:
        digest: of what the client has sent.
        turn: id that the reply's turn has, or was to have.
        fencing_token: that of the turn's lease.
        state: what became of it.
        at: time of the last change of the state, or of the turn's end, in seconds since 1970.
        is_own: whether this process has answered it, or does.
    """

    digest: str
    turn: int
    fencing_token: int
    state: AskedState
    at: int
    is_own: bool = False


@dataclass(frozen=True)
class Lease:
    """The right to write one turn of a session.

    `fencing_token` rises with every lease of the session, and a store refuses
    writes under any but the newest.
    """

    session: str
    fencing_token: int


@dataclass(frozen=True)
class JournalEntry:
    """A generation that did not end: its start and its journalled tokens.

    `damage` describes what cannot be read, empty when all can: `token_ids` are those before it,
    and `start` is None where the start itself is damaged. `fencing_token` is that of its lease,
    `entries` the number of times that tokens were journalled, as far as they can be read.
    """

    start: TurnStart | None
    token_ids: tuple[int, ...]
    damage: str = ""
    fencing_token: int = field(default=0, compare=False)
    entries: int = field(default=0, compare=False)
