"""Generates the table of supported model families in docs/models.md from the code.

`python -m lmchat.cli.support_table docs/models.md` rewrites the table between its two marker lines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError
from turbomind.models import FAMILIES, Family, Layer
from turbomind.models.rope import PROPORTIONAL

BEGIN = "<!-- support table: make docs -->"
END = "<!-- end of support table -->"

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "hidden_size_per_layer_input": 0,
}
_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


def _layers(family: Family, **fields: Any) -> tuple[Layer, ...]:
    """Returns the layers of a small model with `fields`; none if the family refuses one."""
    try:
        return family.describe(_SMALL | fields).layers
    except ModelError:
        return ()


def _layer(family: Family, **fields: Any) -> Layer | None:
    """Returns the last layer of such a model, or None if the family refuses a field."""
    return next(reversed(_layers(family, **fields)), None)


def _ropes(family: Family) -> str:
    scalings = {kind: {"rope_type": kind} | keys for kind, keys in _ROPE.items()}
    found = [kind for kind in scalings if _layer(family, rope_scaling=scalings[kind]) is not None]
    return ", ".join(found + [kind for kind in family.rope_rules.types if kind == PROPORTIONAL])


def _has_window(family: Family) -> bool:
    fields = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    layers = _layers(family, sliding_window=64) + _layers(family, **fields)
    return any(layer.window for layer in layers)


def _experts(family: Family) -> str:
    fields = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
    optional = _layer(family, enable_moe_block=True, **fields)
    for layer, text in ((_layer(family), "yes"), (optional, "`enable_moe_block`")):
        if layer is not None and layer.experts is not None:
            return text
    return "no"


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
        "| `architectures` | attention | experts | biases | q/k norm | rope scalings |",
        "|---|---|---|---|---|---|",
    ]
    for kind in FAMILIES:
        family = kind("")  # without an architecture the fields are those of the language model
        layer = _layer(family)
        attention = "full, sliding window" if _has_window(family) else "full"
        norm = "yes" if layer is not None and layer.qk_norm else "no"
        names = ", ".join(f"`{name}`" for name in (*kind.names, *kind.wrappers))
        cells = (names, attention, _experts(family), _biases(family), norm, _ropes(family))
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
