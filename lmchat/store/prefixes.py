"""What conversations have in common at their beginnings, and so which pages of keys and values.

A page hangs under the pages before it: two transcripts share one where they are equal up to its
end. A page that is not full is one of a transcript's first page, or behind its last full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmchat.page_size import PAGE_TOKENS
from lmchat.store.turns import transcript

if TYPE_CHECKING:
    from lmchat.store.records import JournalEntry, SessionRecord

PAGE = PAGE_TOKENS

Transcript = list[int]


@dataclass
class Common:
    """What a transcript shares with others: its first `pages` full pages; the first `first` tokens
    of its first page, at most 63; `last` tokens behind its last full page, with branches that end
    in that page too (where it has no full page, `last` is `first`). `ends` are the lengths of
    branches that it begins with and that end in the page behind the shared ones."""

    pages: int = 0
    first: int = 0
    last: int = 0
    ends: set[int] = field(default_factory=set)

    def add(self, pages: int = 0, first: int = 0, last: int = 0) -> None:
        """Others share so much."""
        if pages > self.pages:
            self.pages = pages
            self.ends = set()
        self.first = max(self.first, first)
        self.last = max(self.last, last)

    def compare(self, token_ids: Sequence[int], other: Sequence[int], is_end: bool = True) -> None:
        """Another one is this transcript, of a branch or up to a turn within it."""
        pages, same = len(token_ids) // PAGE, equal(token_ids, other)
        self.add(pages=same // PAGE)
        if is_end or len(other) >= PAGE:
            self.add(first=min(same, PAGE - 1))
        if pages == 0:
            self.last = self.first
        elif is_end and same >= pages * PAGE and len(other) // PAGE == pages:
            self.add(last=same - pages * PAGE)
        if is_end and same == len(other) and same // PAGE == self.pages and same % PAGE:
            self.ends.add(same)


def equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    return next((i for i in range(size) if one[i] != other[i]), size)


def ends(record: SessionRecord) -> list[Transcript]:
    """The token ids of all its branches, and up to where the session is."""
    found = set(record.tree.ends())
    if record.leaf is not None:
        found.add(record.leaf)
    return [record.tree.token_ids(turn) for turn in sorted(found)]


def journalled(record: SessionRecord, entry: JournalEntry | None) -> list[Transcript]:
    """Up to the last token of a generation that did not end; none where it cannot be told."""
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
    return [[*transcript(path[::-1])[: start.keep], *asked, *entry.token_ids]]
