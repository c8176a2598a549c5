"""torch's calls for our ops, with enough sets of operands to exceed the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .settings import Settings
from .timing import torch_device

Calls = list[Callable[[], object]]
PAST_CACHE = 200e6  # bytes: several times the L2 cache of any GPU these kernels run on
MOST_SETS = 32


def torch_calls(settings: Settings, figure: dict[str, Any]) -> Calls | None:
    """Returns a call per set of operands; None for ops that torch has no single call for."""
    make = _MAKERS.get(figure["op"])
    if make is None or (figure["op"] == "sample" and figure["case"] != "greedy"):
        return None
    sets = 1 if settings.tiny else int(min(MOST_SETS, max(2, PAST_CACHE / figure["bytes"] + 1)))
    return [make(torch_device(settings), figure) for _ in range(sets)]


def _random(device: str, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _linear(device: str, figure: dict[str, Any]) -> Callable[[], object]:
    """A product without the activation, the residual and the 32-bit sum of ours."""
    from torch.nn import functional

    m, n, k = (figure["dims"][name] for name in "mnk")
    x, w = _random(device, m, k), _random(device, n, k)
    return lambda: functional.linear(x, w)


def _attention(device: str, figure: dict[str, Any]) -> Callable[[], object]:
    """Attention over contiguous K and V, without pages."""
    from torch.nn import functional

    d = figure["dims"]
    q = _random(device, d["batch"], d["heads"], d["queries"], d["dim"])
    k, v = (_random(device, d["batch"], d["kv_heads"], d["keys"], d["dim"]) for _ in range(2))
    if d["queries"] == 1:
        return lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    if d["queries"] == d["keys"]:
        return lambda: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(d["queries"], d["keys"])
    return lambda: functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _norm(device: str, figure: dict[str, Any]) -> Callable[[], object]:
    from torch.nn import functional

    d = figure["dims"]
    x, weight = _random(device, d["rows"], d["cols"]), _random(device, d["cols"])
    return lambda: functional.rms_norm(x, (d["cols"],), weight, 1e-6)


def _embedding(device: str, figure: dict[str, Any]) -> Callable[[], object]:
    import torch

    d = figure["dims"]
    table = _random(device, d["vocab"], d["cols"])
    ids = torch.randint(d["vocab"], (d["rows"],), device=device)
    return lambda: torch.nn.functional.embedding(ids, table)


def _sample(device: str, figure: dict[str, Any]) -> Callable[[], object]:
    """Greedy sampling; other settings take several calls."""
    import torch

    d = figure["dims"]
    logits = torch.randn(d["rows"], d["vocab"], device=device)
    return lambda: logits.argmax(-1)


_MAKERS: dict[str, Callable[[str, dict[str, Any]], Callable[[], object]]] = {
    "linear": _linear,
    "attention_decode": _attention,
    "attention_prefill": _attention,
    "rms_norm": _norm,
    "embedding": _embedding,
    "sample": _sample,
}
