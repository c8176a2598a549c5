"""What a replica has in common with the launcher of its deployment: a key, and the weights.

The launcher sets variables in the environment of its replicas. Its key does not
change when the users' keys are rotated.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping

from lmchat.errors import ModelError
from lmchat.server.logs import NAME

_KEY = "LMCHAT_LAUNCHER_KEY"
_WEIGHTS = "LMCHAT_LAUNCHER_WEIGHTS"
_OWNER = "launcher"
_SHOWN = 12  # characters of a fingerprint in a message


def environment(number: int, key: str, weights: int) -> dict[str, str]:
    """Returns the variables that a launcher sets for its replicas.

    Args:
        number: the number of the replica, which its log names.
        key: an API key of its own.
        weights: the descriptor of an open file, which replicas inherit. The first replica writes
            the fingerprint of its weights there; an empty file accepts any weights.
    """
    return {NAME: f"replica {number}", _KEY: key, _WEIGHTS: str(weights)}


def with_launcher_key(keys: Mapping[str, str]) -> dict[str, str]:
    """Returns API keys and their owners with the launcher's key, if keys are needed at all."""
    key = os.environ.get(_KEY)
    return {**keys, key: _OWNER} if keys and key else dict(keys)


def check_weights(model: str, fingerprint: str) -> None:
    """Refuses other weights than those of the deployment's first replica.

    Args:
        model: the model's name.
        fingerprint: that of the weights that this process has loaded.

    Raises:
        ModelError: the weights are others.
    """
    if (number := os.environ.get(_WEIGHTS)) is None:
        return
    with open(int(number), "r+b", buffering=0) as file:  # replicas share its position
        fcntl.lockf(file, fcntl.LOCK_EX)
        first = os.pread(file.fileno(), 4096, 0).decode()
        if not first:
            os.pwrite(file.fileno(), fingerprint.encode(), 0)
    if first not in ("", fingerprint):
        raise ModelError(
            f"{model} has other weights than the deployment's first replica loaded: fingerprint is "
            f"{fingerprint[:_SHOWN]}, expected {first[:_SHOWN]}; lmchat deploy restart updates all "
            "replicas"
        )
