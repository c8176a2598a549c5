"""Changes of a session that generate nothing and are made once, however often a client sends
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SECONDS = 24 * 3600.0
"""Time for which a key is that of its change."""

_MOST = 64  # keys of one session


@dataclass(frozen=True)
class Once:
    """A change with a key, which the session stores with the change.

    Attributes:
        key: names the change.
        digest: of what the client has sent.
        check: called with the stored digest of a change with this key. It may refuse this one by an
            error.
    """

    key: str
    digest: str
    check: Callable[[str], object]

    def is_made(self, keys: Mapping[str, Any]) -> bool:
        """Returns whether the keys of a session have the change."""
        found = keys.get(self.key)
        if found is None or found["at"] < time.time() - SECONDS:
            return False
        self.check(found["digest"])
        return True

    def added_to(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys with this one, without old ones."""
        now = int(time.time())
        kept = {name: one for name, one in keys.items() if one["at"] >= now - SECONDS}
        newest = list(kept.items())[1 - _MOST :]
        return {**dict(newest), self.key: {"digest": self.digest, "at": now}}
