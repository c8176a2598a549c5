"""What a list says of one session: the store's summary, and where its keys and values are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.records import Summary


@dataclass(frozen=True)
class Row:
    """A session in a list. What is not known is None: bytes of a tier where nobody looked, or where
    no engine runs.

    Bytes on disk are of all its branches, in stored pages; branches and sessions may share some.
    Those of the device and the host are of the current conversation.
    `resident` is how many tokens of the transcript, from its beginning on, have keys and values.
    """

    summary: Summary
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    resident: int | None = None
    predicted_ttft: float | None = None  # seconds, of the next turn

    @property
    def residence(self) -> str | None:
        """Whether "all", "part" or "none" of its keys and values is there; None: nobody looked, or
        there is nothing yet that has any."""
        if self.resident is None or not self.summary.tokens:
            return None
        # The last token of a reply is computed with the turn after it.
        if self.resident and self.resident >= self.summary.tokens - 1:
            return "all"
        return "part" if self.resident else "none"

    def as_json(self) -> dict[str, Any]:
        """With the names that `--json` prints."""
        found = self.summary
        return {
            "name": found.name,
            "id": found.id,
            "owner": found.owner,
            "title": found.title,
            "tags": list(found.tags),
            "turns": found.turns,
            "tokens": found.tokens,
            "bytes": {
                "device": self.device_bytes,
                "host": self.host_bytes,
                "disk": self.disk_bytes,
            },
            "residence": self.residence,
            "resident_tokens": self.resident,
            "predicted_ttft": self.predicted_ttft,
            "pinned": found.pinned,
            "busy": found.busy,
            "created": found.created.astimezone(timezone.utc).isoformat(),
            "last_used": found.last_used.astimezone(timezone.utc).isoformat(),
            "model": found.model,
            "fingerprint": found.fingerprint,
        }


def predicted_ttft(tokens: int, resident: int, speeds: object) -> float | None:
    """Seconds to the first token of the next turn: to load what is resident and compute the rest,
    or to compute all where that is sooner. None where a speed is not known, and before the first
    turn, which may be of any length.

    `speeds` are those that an engine measured: `disk_read` in bytes/s, `prefill` in tokens/s, and
    `kv_bytes_per_token`.
    """
    if not tokens or not isinstance(speeds, Mapping):
        return None
    read, prefill, size = (
        _positive(speeds.get(name)) for name in ("disk_read", "prefill", "kv_bytes_per_token")
    )
    if prefill is None:
        return None
    again = max(1, tokens) / prefill
    if not resident:
        return again
    if read is None or size is None:
        return None
    return min(again, resident * size / read + max(1, tokens - resident) / prefill)


def _positive(value: object) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and value > 0 else None  # type: ignore[arg-type, operator]


_ORDERS: dict[str, tuple[Callable[[Row], Any], bool]] = {
    "used": (lambda row: row.summary.last_used, True),
    "created": (lambda row: row.summary.created, True),
    "name": (lambda row: row.summary.name.casefold(), False),
    "turns": (lambda row: row.summary.turns, True),
    "tokens": (lambda row: row.summary.tokens, True),
    "bytes": (lambda row: row.disk_bytes or 0, True),
}
ORDERS = tuple(_ORDERS)


def ordered(rows: Iterable[Row], order: str) -> list[Row]:
    """Sorted by one of ORDERS; the largest or latest first, names from A on."""
    if order not in _ORDERS:
        raise InvalidRequest(f"--sort is {order!r}, expected one of {', '.join(ORDERS)}")
    key, falling = _ORDERS[order]
    return sorted(rows, key=key, reverse=falling)


def ago(moment: datetime, now: datetime) -> str:
    """How long ago, in one unit."""
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((31_557_600, "y"), (604_800, "w"), (86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "now"
