"""What the reference implementations read of a config: `reference_fields.json`.

`tools/reference_fields.py` writes the file from transformers; a test compares the two. A field that
the reference of a family reads and the family does not must have the reference's default. Other
fields are ignored, as the reference ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("reference_fields.json")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_bytes())
    return table


def fields_read(model_type: str) -> Mapping[str, Any]:
    """Returns the fields that the reference of a language model reads, with their defaults."""
    fields: Mapping[str, Any] = _table()["models"][model_type]
    return fields


def rope_fields_read(kind: str) -> Mapping[str, Any]:
    """Returns the fields of `rope_parameters` that the reference reads for a type of rotation."""
    return dict.fromkeys(_table()["rope"][kind])


@cache
def fields_without_effect() -> frozenset[str]:
    """Returns fields that change no logits: of training, generation, provenance and outputs."""
    return frozenset(_table()["without_effect"])


@cache
def gguf_keys() -> frozenset[str]:
    """Returns the keys that GGUF files of any architecture may have, without the architecture."""
    return frozenset(_table()["gguf_keys"])
