"""Phase `ceilings`: highest rates of memory, matrix units and launches of this GPU."""

from __future__ import annotations

from typing import Any

from .bench import run_bench
from .settings import Settings, write_json
from .timing import time_torch, torch_device, torch_or_why


def run_phase(settings: Settings) -> dict[str, Any]:
    """Measures the ceilings by our own program (`figures`) and by torch (`torch`).

    `limits` has the better of both, with which other phases compare: bytes/s of reading and
    copying, FLOP/s of bf16.
    """
    figures, error = run_bench(settings, ["ceilings"], 40)
    result: dict[str, Any] = {"figures": figures, "torch": {"error": "not measured"}}
    result |= {"limits": limits(figures), "error": error}
    # Written before torch starts, which may take too long.
    write_json(settings.result_path("ceilings"), result)
    result["torch"] = torch_ceilings(settings)
    result["limits"] = limits([*figures, *result["torch"].get("figures", [])])
    return result


def limits(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the highest rate of each kind that the figures have."""
    found: dict[str, float] = {}

    def raise_to(name: str, value: float) -> None:
        found[name] = max(found.get(name, 0.0), value)

    for figure in figures:
        if not figure.get("ms"):
            continue
        if figure["op"] == "memory":
            kind = "read" if figure["case"] == "read" else "copy"
            if figure["case"] != "fill":
                raise_to(f"{kind}_bytes_per_s", figure["bytes"] / figure["ms"] * 1e3)
        elif figure["op"] == "linear":
            raise_to("bf16_flop_per_s", figure["flops"] / figure["ms"] * 1e3)
        elif figure["op"] == "launch" and figure["case"] == "node of a graph":
            found["graph_node_ms"] = figure["ms"]
    return found


def torch_ceilings(settings: Settings) -> dict[str, Any]:
    """Measures a large copy and a large product by torch, or returns why it cannot."""
    torch, why = torch_or_why(settings)
    if torch is None:
        return {"error": why}
    device = torch_device(settings)
    size = 64 if settings.tiny else 8192
    count = 1 << (12 if settings.tiny else 30)  # 16-bit elements
    figures = []
    try:
        both = torch.randn(2, count, device=device, dtype=torch.bfloat16)
        ms = time_torch(settings, [lambda: both[0].copy_(both[1])])
        figures.append({"op": "memory", "case": "copy", "ms": ms, "bytes": 4 * count, "flops": 0})
        sides = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
        ms = time_torch(settings, [lambda: sides[0] @ sides[1].T])
        work = {"bytes": 6 * size * size, "flops": 2 * size**3}
        figures.append({"op": "linear", "case": "square", "ms": ms, **work})
    except RuntimeError as error:  # out of memory, or no kernels for this GPU
        return {"figures": figures, "error": str(error)[:1000]}
    return {"figures": figures}
