"""Runs gpu_bench, whose lines of JSON are the figures of two phases."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import run, toolkit_folders


def run_bench(settings: Settings, what: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Its figures, those it had before its time was over too, and what went wrong (or "")."""
    program = Path(settings.drivers) / "gpu_bench"
    log = Path(settings.work) / f"gpu_bench-{what}.log"
    command = [str(program), "--what", what]
    if not settings.emulated:
        command.append("--gpu")
        for folder in library_folders():
            command += ["--library", folder]
    if settings.tiny:
        command.append("--quick")
    done = run(command, seconds, log=log)
    figures, said = [], []
    for line in done.output.splitlines():
        try:
            figures.append(derive(json.loads(line)))
        except ValueError:
            said.append(line)  # of the last one, cut off, too
    if not figures and not done.ok:
        raise RuntimeError(f"gpu_bench {done.status}: {done.tail}")
    return figures, "" if done.ok else f"{done.status}: {' '.join(said)[-1000:]}"


def derive(figure: dict[str, Any]) -> dict[str, Any]:
    """Adds GB/s and TFLOP/s to what has a time."""
    if figure.get("ms"):
        figure["gb_per_s"] = figure["bytes"] / figure["ms"] / 1e6
        figure["tflop_per_s"] = figure["flops"] / figure["ms"] / 1e9
    return figure


def library_folders() -> list[str]:
    """Folders of the system and of wheels that may hold cuBLASLt."""
    roots = [folder / "lib64" for folder in toolkit_folders()]
    for entry in dict.fromkeys(sys.path):
        roots += [Path(entry) / "nvidia" / name / "lib" for name in ("cu13", "cublas")]
    return [os.fspath(root) for root in dict.fromkeys(roots) if root.is_dir()]
