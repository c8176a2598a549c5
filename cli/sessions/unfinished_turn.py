"""Reads the journal of a turn whose process died.

Without a tokenizer, the journalled tokens have no text; opening the session adds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmchat.errors import StoreError
from lmchat.store.turns import Turn

if TYPE_CHECKING:
    from lmchat.store.protocol import Store
    from lmchat.store.records import JournalEntry, SessionRecord, TurnStart

_INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Unfinished:
    """An unfinished turn.

    Attributes:
        path: The conversation, with that turn at its end.
        token_ids: The last token ids of its reply, which have no text.
    """

    path: list[Turn]
    token_ids: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the turn as `--json` prints it."""
        asked = [turn.text for turn in self.path if turn.role == "user"]
        return {"question": asked[-1] if asked else None, "token_ids": list(self.token_ids)}


def unfinished(store: Store, record: SessionRecord) -> Unfinished | None:
    """Returns the unfinished turn of a session.

    Returns:
        The turn; None if there is none, its process is alive, or the journal is damaged.

    Raises:
        NotFound: The session was deleted.
    """
    try:
        entry = store.unfinished(record)
    except StoreError:  # opening the session reports the damage
        return None
    start = None if entry is None else entry.start
    if entry is None or start is None or start.is_stored(record.tree):
        return None
    path = _before(record, start)
    return None if path is None else Unfinished(_with_reply(path, start, entry), entry.token_ids)


def _before(record: SessionRecord, start: TurnStart) -> list[Turn] | None:
    """Returns the conversation up to the turn's question, or to the reply that it extends."""
    tree = record.tree
    if start.past:
        from lmchat.sessions.rewrite import with_turns

        tree = with_turns(record, start.past).tree
    if start.parent is not None and start.parent not in tree:
        return None
    return tree.path(start.parent) + ([start.user] if start.user else [])


def _with_reply(path: list[Turn], start: TurnStart, entry: JournalEntry) -> list[Turn]:
    if not entry.token_ids:
        return path
    if start.extends is not None:
        *path, last = path
        ids = last.token_ids[: len(last.token_ids) - last.stopped] + entry.token_ids
        return [*path, replace(last, token_ids=ids, stopped=False, finish_reason=_INTERRUPTED)]
    reply = Turn(start.reply_id, path[-1].id, "assistant", "", {}, entry.token_ids)
    return [*path, replace(reply, finish_reason=_INTERRUPTED)]
