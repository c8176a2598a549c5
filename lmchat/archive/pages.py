"""Pages in an archive: KV with its place in the session.

A page is identified by its tokens, not by its block hash, which depends on the owner's salt. Its
format is not that of a page store.
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
    """The KV of 1 to 64 tokens of a session.

    Attributes:
        turn: the turn whose transcript has the tokens.
        start: index of the first token in that transcript.
        token_ids: the tokens.
        group: the cache group.
        numerics: numerics fingerprint of the arithmetic that computed the page.
        first_head: the first KV head in the payload.
        heads: number of KV heads in the payload.
        payload: the KV in canonical order, [layer][K|V][head][token][dim].
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
        """Returns the entry of an archive: a line of JSON, then the payload."""
        head = {name: getattr(self, name) for name in _HEAD["required"]}
        head["token_ids"] = list(self.token_ids)
        return json_text.dump("page", head) + b"\n" + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> ArchivePage:
        """Parses an entry. Raises InvalidRequest for what `to_bytes()` does not write."""
        line, end, payload = data.partition(b"\n")
        if not end or len(line) > _MAX_HEAD or not payload:
            raise InvalidRequest("it does not start with a line that describes it")
        head: dict[str, Any] = json_text.load("its first line", line, floats=False)
        _SCHEMA.check(head)
        return cls(**{**head, "token_ids": tuple(head["token_ids"])}, payload=payload)


class PlaceCheck:
    """Checks that pages belong to a session and are ordered by turn, start, group and head."""

    def __init__(self, record: SessionRecord) -> None:
        self._record = record
        self._last = (0, -1, -1, -1)
        self._turn = 0
        self._ids: list[int] = []

    def check(self, page: ArchivePage) -> None:
        """Raises InvalidRequest where `page` is foreign, or does not follow the previous one."""
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
    """Yields turn and transcript of each branch's end and of the current turn, ascending."""
    ends = set(record.tree.ends())
    if record.leaf is not None:
        ends.add(record.leaf)
    for turn in sorted(ends):
        yield turn, record.tree.token_ids(turn)
