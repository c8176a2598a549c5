"""Phase `speed`: our ops on real models' shapes, as fractions of the ceilings, beside torch."""

from __future__ import annotations

import time
from typing import Any

from .bench import run_bench
from .settings import Settings, write_json
from .timing import time_torch, torch_or_why
from .torch_ops import torch_calls

PARTS = ("linear", "attention", "rope", "rows")
OURS_SECONDS = 60.0
TORCH_SECONDS = 30.0


def run_phase(settings: Settings) -> dict[str, Any]:
    """Measures ops by gpu_bench and torch.

    Each figure has `of_bytes` and `of_flops`, fractions of this GPU's ceilings, and `torch_ms`.
    """
    figures, error = run_bench(settings, PARTS, OURS_SECONDS)
    limits = settings.result_of("ceilings").get("limits", {})
    assert isinstance(limits, dict)
    for figure in figures:
        add_fractions(figure, limits)
    result: dict[str, Any] = {"figures": figures, "error": error, "torch": "not measured"}
    write_json(settings.result_path("speed"), result)
    result["torch"] = add_torch(settings, figures)
    return result


def add_fractions(figure: dict[str, Any], limits: dict[str, float]) -> None:
    """Adds the fractions of the ceilings of copies and matrix units, where they were measured."""
    if not figure.get("ms"):
        return
    for name, work, limit in (
        ("of_bytes", "bytes", "copy_bytes_per_s"),
        ("of_flops", "flops", "bf16_flop_per_s"),
    ):
        if limits.get(limit) and figure[work]:
            figure[name] = figure[work] / figure["ms"] * 1e3 / limits[limit]


def add_torch(settings: Settings, figures: list[dict[str, Any]]) -> str:
    """Times the same ops by torch until the time is over; returns how many."""
    torch, why = torch_or_why(settings)
    if torch is None:
        return why
    end = time.monotonic() + TORCH_SECONDS
    measured = 0
    seen: dict[str, float] = {}  # several of our kernels compute the same op
    for figure in figures:
        if "ms" not in figure:
            continue
        key = f"{figure['op']} {figure['case']} {figure['dims']}"
        if key not in seen:
            if time.monotonic() > end:
                return f"{measured} measured, then the time was over"
            try:
                calls = torch_calls(settings, figure)
                if calls is None:
                    continue
                seen[key] = time_torch(settings, calls)
            except Exception as error:  # an error of torch is recorded, not raised
                figure["torch_error"] = str(error)[:300]
                continue
            finally:
                calls = None
                if not settings.emulated:
                    torch.cuda.empty_cache()
        figure["torch_ms"] = seen[key]
        measured += 1
    return f"{measured} measured"
