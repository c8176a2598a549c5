"""Generates the table of supported model families in docs/models.md from the code.

`python -m lmchat.cli.support_table docs/models.md` rewrites the table between its two marker lines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError
from turbomind.models import FAMILIES, Family, Layer
from turbomind.models.rope import TYPES

BEGIN = "<!-- support table: make docs -->"
END = "<!-- end of support table -->"

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
_ROPE = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE_KEYS = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}


def _layer(family: Family, **fields: Any) -> Layer | None:
    """Returns the last layer of a small model with `fields`, or None if the family refuses one."""
    try:
        return family.describe(_SMALL | fields).layers[-1]
    except ModelError:
        return None


def _ropes(family: Family) -> str:
    accepted = []
    for kind in TYPES:
        keys = _ROPE_KEYS.get(kind, tuple(_ROPE))
        scaling = {"rope_type": kind} | {key: _ROPE[key] for key in keys}
        if kind != "default" and _layer(family, rope_scaling=scaling) is not None:
            accepted.append(kind)
    return ", ".join(accepted)


def _has_window(family: Family) -> bool:
    layer = _layer(family, sliding_window=64) or _layer(family)
    if layer is not None and not layer.window:
        fields = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
        layer = _layer(family, **fields)
    return layer is not None and layer.window > 0


def _biases(family: Family) -> str:
    always = _layer(family, attention_bias=False, bias=False, mlp_bias=False) or _layer(family)
    flags = [f for f in ("attention_bias", "bias", "mlp_bias") if _reads(family, f)]
    words = ["q, k, v"] if always and always.qkv_bias and not flags else []
    return ", ".join(words + [f"`{flag}`" for flag in flags]) or "none"


def _reads(family: Family, flag: str) -> bool:
    on, off = _layer(family, **{flag: True}), _layer(family, **{flag: False})
    return on is not None and off is not None and on != off


def table() -> str:
    """Returns the table as Markdown."""
    lines = [
        "| `architectures` | attention | biases | q/k norm | rope scalings |",
        "|---|---|---|---|---|",
    ]
    for kind in FAMILIES:
        family = kind()
        layer = _layer(family)
        attention = "full, sliding window" if _has_window(family) else "full"
        norm = "yes" if layer is not None and layer.qk_norm else "no"
        cells = (f"`{kind.architecture}`", attention, _biases(family), norm, _ropes(family))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rewrite(text: str) -> str:
    """Returns `text` with the current table between its two markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"markers not found: {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
