"""Measures how fast a model's weights are loaded, and in how much memory."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import typer

from turbomind import ModelInfo, plan

_MEMORY = Path("/proc/self/statm")
_SAMPLE = 0.002  # seconds between two looks at the memory
_READ = 16 << 20  # bytes


class _Peak:
    """Notes the most anonymous memory of the process while it lives."""

    def __init__(self) -> None:
        self.before = self.most = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE):
            self.most = max(self.most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Returns the anonymous memory (RssAnon) that this process has; 0 where no system tells."""
    try:
        _, resident, shared = map(int, _MEMORY.read_text().split()[:3])  # shared: of files
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def run(model: str | os.PathLike[str], options: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Loads a model several times, its files in the page cache, and returns the report.

    Args:
        model: Model folder or GGUF file.
        options: The engine options that are given.
        repeat: Rounds.
    """
    first = plan(model, **options)
    files = _files(first.model)
    for file in files:
        _read(file)
    rounds = [_round(model, options) for _ in range(repeat)]
    size = sum(file.stat().st_size for file in files)
    seconds, cpu, headers = (statistics.median(r[name] for r in rounds) for name in _TIMES)
    return {
        "model": str(files[0] if len(files) == 1 else files[0].parent),
        "threads": first.threads,
        "isa": first.isa,
        "file_bytes": size,
        "packed_bytes": rounds[0]["packed_bytes"],
        "peak_bytes": max(r["peak_bytes"] for r in rounds),
        "seconds": seconds,
        "header_seconds": headers,
        "cpu_seconds": cpu,
        "bytes_per_second": size / seconds,
        "bytes_per_cpu_second": size / cpu,
    }


_TIMES = ("seconds", "cpu_seconds", "header_seconds")


def _round(model: str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Any]:
    with _Peak() as peak:
        begin, cpu = time.perf_counter(), time.process_time()
        made = plan(model, **options)
        headers = time.perf_counter() - begin
        loaded = made.load()
        seconds, used = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "header_seconds": headers,
        "packed_bytes": loaded.weight_bytes,
        "peak_bytes": peak.most - peak.before,
    }


def _files(info: ModelInfo) -> list[Path]:
    return [file.path for file in info.sources.checkpoint.files] if info.sources else []


def _read(path: Path) -> None:
    """Reads a file, so that it is in the system's page cache as far as it fits."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        while file.read(_READ):
            pass


def show(report: dict[str, Any]) -> None:
    """Prints a report."""
    megabytes = {name: report[name] / 1e6 for name in ("file_bytes", "packed_bytes")}
    above = (report["peak_bytes"] - report["packed_bytes"]) / 2**20
    for name, value in (
        ("files", f"{megabytes['file_bytes']:.0f} MB, in the page cache"),
        ("time", f"{report['seconds']:.2f} s on {report['threads']} threads ({report['isa']}), "
                 f"of which headers {report['header_seconds']:.2f} s"),
        ("speed", f"{report['bytes_per_second'] / 1e6:.0f} MB/s, "
                  f"{report['bytes_per_cpu_second'] / 1e6:.0f} MB per second of one core"),
        ("packed", f"{megabytes['packed_bytes']:.0f} MB"),
        ("peak", f"{report['peak_bytes'] / 1e6:.0f} MB of anonymous memory, "
                 f"{above:.0f} MiB above the packed weights"),
    ):  # fmt: skip
        typer.echo(f"{name:8} {value}")
