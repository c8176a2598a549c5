"""The fields that all objects of one response have."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from lmchat.server.state import ServerState


class Envelope:
    """The fields that all objects of one response have.

    Args:
        id: the response's id.
        kind: the object's name.
        created: time of the request, in seconds of the epoch.
        model: name of the model.
        fingerprint: the engine's fingerprint.
    """

    def __init__(self, id: str, kind: str, created: int, model: str, fingerprint: str) -> None:
        self.fields: dict[str, Any] = {
            "id": id,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def head(self) -> str:
        """Returns the start of an event that has these fields."""
        return "data: " + json.dumps(self.fields, separators=(",", ":"))[:-1] + ","


def envelope_of(state: ServerState, id: str, kind: str) -> Envelope:
    """Returns the fields of a response that begins now.

    The system fingerprint is equal for engines that produce the same bits for the same seed.
    """
    core = state.engine.sync.core
    digest = hashlib.sha256(f"{core.fingerprint} {core.numerics_fingerprint}".encode()).hexdigest()
    return Envelope(id, kind, int(time.time()), state.model_name, f"fp_{digest[:12]}")
