"""Prefixes that transcripts share, and so the pages of KV that they share.

Two transcripts share a page if they are equal up to its end. A page that is not full starts at a
transcript's first token, or follows its last full page.

Not here: the table that finds shared prefixes in a store (`lmchat.store.sqlite.prefix_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmchat.page_size import PAGE_TOKENS
from lmchat.store.turns import common_prefix, transcript

if TYPE_CHECKING:
    from lmchat.store.records import JournalEntry, SessionRecord

PAGE = PAGE_TOKENS

Transcript = list[int]


@dataclass
class SharedPrefix:
    """The prefix that a transcript shares with others.

    Attributes:
        pages: full pages, from the first on.
        first: tokens of the first page, at most 63.
        last: tokens after the last full page, shared with branches that end in that page too.
            Without a full page it equals `first`.
        ends: lengths, in tokens, of branches that are prefixes of the transcript and end in the
            page after the shared ones.
    """

    pages: int = 0
    first: int = 0
    last: int = 0
    ends: set[int] = field(default_factory=set)

    def add(self, pages: int = 0, first: int = 0, last: int = 0) -> None:
        """Raises each length to the given one, of another transcript."""
        if pages > self.pages:
            self.pages = pages
            self.ends = set()
        self.first = max(self.first, first)
        self.last = max(self.last, last)

    def compare(self, token_ids: Sequence[int], other: Sequence[int], is_end: bool = True) -> None:
        """Takes another transcript into account.

        Args:
            token_ids: the transcript itself.
            other: another one.
            is_end: whether `other` is a whole branch, not one up to a turn within it.
        """
        pages, same = len(token_ids) // PAGE, common_prefix(token_ids, other)
        self.add(pages=same // PAGE)
        if is_end or len(other) >= PAGE:
            self.add(first=min(same, PAGE - 1))
        if pages == 0:
            self.last = self.first
        elif is_end and same >= pages * PAGE and len(other) // PAGE == pages:
            self.add(last=same - pages * PAGE)
        if is_end and same == len(other) and same // PAGE == self.pages and same % PAGE:
            self.ends.add(same)


def ends(record: SessionRecord) -> list[Transcript]:
    """Returns the transcripts of all branches of a session, and of its current turn."""
    found = set(record.tree.ends())
    if record.leaf is not None:
        found.add(record.leaf)
    return [record.tree.token_ids(turn) for turn in sorted(found)]


def journalled(record: SessionRecord, entry: JournalEntry | None) -> list[Transcript]:
    """Returns the transcript up to the last token of an unfinished generation.

    Returns an empty list where the journal does not determine it.
    """
    if entry is None or entry.start is None:
        return []
    start = entry.start
    made = {turn.id: turn for turn in start.past}
    path, at = [], start.parent
    while at is not None:
        if at not in made and at not in record.tree:  # the session itself is damaged
            return []
        path.append(made.get(at) or record.tree.get(at))
        at = path[-1].parent
    asked = start.user.token_ids if start.user else ()
    return [[*transcript(path[::-1])[: start.prefix_length], *asked, *entry.token_ids]]
