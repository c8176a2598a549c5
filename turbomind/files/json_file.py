"""Files that hold one JSON object: configurations and indexes of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ModelError unless it can be read and is one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object")
    return value
