"""Runs gpu_bench, which prints figures of two phases as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import run, toolkit_folders


def run_bench(
    settings: Settings, parts: Sequence[str], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Returns the figures of its parts, and the errors (or "").

    Each part is a process of its own: a kernel that fails takes what comes after it along. Figures
    from before the time was over count.
    """
    end = time.monotonic() + seconds
    figures: list[dict[str, Any]] = []
    errors = []
    for part in parts:
        found, error = run_part(settings, part, end - time.monotonic())
        figures += found
        errors += [f"{part} {error}"] if error else []
    if not figures:
        raise RuntimeError("; ".join(errors))
    return figures, "; ".join(errors)


def run_part(settings: Settings, part: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Runs one process of gpu_bench."""
    if seconds <= 1:
        return [], "not begun: the time was over"
    command = [str(Path(settings.drivers) / "gpu_bench"), "--what", part]
    if not settings.emulated:
        command.append("--gpu")
        for folder in library_folders():
            command += ["--library", folder]
    if settings.tiny:
        command.append("--quick")
    done = run(command, seconds, log=Path(settings.work) / f"gpu_bench-{part}.log")
    figures, lines = [], []
    for line in done.output.splitlines():
        try:
            figures.append(derive(json.loads(line)))
        except ValueError:
            lines.append(line)  # also the last one, which may be cut off
    return figures, "" if done.ok else f"{done.status}: {' '.join(lines)[-1000:]}"


def derive(figure: dict[str, Any]) -> dict[str, Any]:
    """Adds GB/s and TFLOP/s to figures with a time."""
    if figure.get("ms"):
        figure["gb_per_s"] = figure["bytes"] / figure["ms"] / 1e6
        figure["tflop_per_s"] = figure["flops"] / figure["ms"] / 1e9
    return figure


def library_folders() -> list[str]:
    """Lists folders of the system and of wheels that may hold cuBLASLt."""
    roots = [folder / "lib64" for folder in toolkit_folders()]
    for entry in dict.fromkeys(sys.path):
        roots += [Path(entry) / "nvidia" / name / "lib" for name in ("cu13", "cublas")]
    return [os.fspath(root) for root in dict.fromkeys(roots) if root.is_dir()]
