"""A session in a list: the store's summary, and where its KV cache is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.store.records import Summary


@dataclass(frozen=True)
class Row:
    """A session in a list. Unknown values are None.

    Attributes:
        summary: The store's summary.
        device_bytes: KV of the current conversation in device memory; None without an engine.
        host_bytes: KV of the current conversation in host memory; None without an engine.
        disk_bytes: KV pages of all branches on disk; branches and sessions may share pages.
        resident: Length of the longest cached prefix of the conversation, in tokens.
        predicted_ttft: Predicted time to first token of the next turn, in seconds.
    """

    summary: Summary
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    resident: int | None = None
    predicted_ttft: float | None = None

    @property
    def residence(self) -> str | None:
        """Cached part of the conversation: "all", "part" or "none"; None if unknown or empty."""
        if self.resident is None or not self.summary.tokens:
            return None
        # The KV of a reply's last token is computed with the next turn.
        if self.resident and self.resident >= self.summary.tokens - 1:
            return "all"
        return "part" if self.resident else "none"

    def as_json(self) -> dict[str, Any]:
        """Returns the row as `--json` prints it."""
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
    """Predicts the time to first token of the next turn.

    The prediction loads the cached prefix and computes the rest, or computes everything if that is
    faster.

    Args:
        tokens: Length of the conversation, in tokens.
        resident: Length of its cached prefix, in tokens.
        speeds: Speeds that an engine measured: `disk_read` in bytes/s, `prefill` in tokens/s, and
            `kv_bytes_per_token`.

    Returns:
        Seconds; None if a speed is unknown, or before the first turn.
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
    """Sorts rows by one of ORDERS: names ascending, all else descending.

    Raises:
        InvalidRequest: The order is unknown.
    """
    if order not in _ORDERS:
        raise InvalidRequest(f"--sort is {order!r}, expected one of {', '.join(ORDERS)}")
    key, falling = _ORDERS[order]
    return sorted(rows, key=key, reverse=falling)


def ago(moment: datetime, now: datetime) -> str:
    """Returns the age of a moment in one unit, such as `3 h ago`."""
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((31_557_600, "y"), (604_800, "w"), (86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "now"
