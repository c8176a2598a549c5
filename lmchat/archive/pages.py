"""Pages in an archive: keys and values, each with the place in the session that they belong to.

Nothing in here depends on the store that a page came from: neither its block hashes, seeded with
the owner's salt, nor its file format. A page is named by its tokens, as the tree has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmchat.archive import json_text
from lmchat.archive.schema import Schema
from lmchat.errors import InvalidRequest
from lmchat.page_size import PAGE_TOKENS
from lmchat.store.records import SessionRecord

MAX_PAGE = 256 << 20  # bytes of one page of one group
_MAX_HEAD = 4096  # bytes of the line before the payload
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2147483647}
_TEXT = {"type": "string", "pattern": "^[ -~]{0,255}$"}
_HEAD: dict[str, Any] = {
    "type": "object",
    "required": ["turn", "start", "token_ids", "group", "numerics", "first_head", "heads"],
    "additionalProperties": False,
    "properties": {
        "turn": _COUNT,
        "start": _COUNT,
        "token_ids": {"type": "array", "items": _COUNT, "maxItems": PAGE_TOKENS},
        "group": _COUNT,
        "numerics": _TEXT,
        "first_head": _COUNT,
        "heads": _COUNT,
    },
}
_SCHEMA = Schema(_HEAD)


@dataclass(frozen=True)
class ArchivePage:
    """KV of `token_ids` (1 to 64), which stand in the transcript of `turn` from `start` on.

    `payload` is in canonical order, [layer][K|V][head][token][dim] of the cache group `group`, and
    holds `heads` heads from `first_head` on. `numerics` is the id of the arithmetic that made it.
    """

    turn: int
    start: int
    token_ids: tuple[int, ...]
    group: int
    numerics: str
    first_head: int
    heads: int
    payload: bytes

    def to_bytes(self) -> bytes:
        """An entry of an archive: a line of JSON, then the payload."""
        head = {name: getattr(self, name) for name in _HEAD["required"]}
        head["token_ids"] = list(self.token_ids)
        return json_text.dump("page", head) + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> ArchivePage:
        """InvalidRequest for what `to_bytes()` does not write."""
        line, end, payload = data.partition(b"\n")
        if not end or len(line) > _MAX_HEAD or not payload:
            raise InvalidRequest("it does not begin with a line that says what it is")
        head: dict[str, Any] = json_text.load("its first line", line, floats=False)
        _SCHEMA.check(head)
        return cls(**{**head, "token_ids": tuple(head["token_ids"])}, payload=payload)


class PlaceCheck:
    """Whether pages are ones of a session, in canonical order: by turn, start and group."""

    def __init__(self, record: SessionRecord) -> None:
        self._record = record
        self._last = (0, -1, -1, -1)
        self._turn = 0
        self._ids: list[int] = []

    def check(self, page: ArchivePage) -> None:
        """InvalidRequest when `page` is not, or does not follow the one before."""
        place = (page.turn, page.start, page.group, page.first_head)
        if place <= self._last:
            raise InvalidRequest(f"page {place} follows {self._last}, expected ascending ones")
        self._last = place
        if page.turn not in self._record.tree:
            raise InvalidRequest(f"it is of turn {page.turn}, expected one of the session")
        if page.turn != self._turn:
            self._turn, self._ids = page.turn, self._record.tree.token_ids(page.turn)
        ids = tuple(self._ids[page.start : page.start + PAGE_TOKENS])
        if page.start % PAGE_TOKENS or not page.token_ids:
            raise InvalidRequest(f"it holds nothing, or begins at {page.start}, amid a page")
        if page.token_ids != ids[: len(page.token_ids)]:
            raise InvalidRequest(f"it has other tokens than turn {page.turn} at {page.start}")


def page_places(record: SessionRecord) -> Iterator[tuple[int, list[int]]]:
    """Turn and transcript of each branch's end, and of the session's, ascending: what has pages."""
    ends = set(record.tree.ends())
    if record.leaf is not None:
        ends.add(record.leaf)
    for turn in sorted(ends):
        yield turn, record.tree.token_ids(turn)
