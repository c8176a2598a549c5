"""Times of torch's calls, measured like ours: replays of a graph between two events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .settings import Settings


def torch_or_why(settings: Settings) -> tuple[Any, str]:
    """Returns the torch module, or None and the reason."""
    try:
        import torch
    except ImportError as error:
        return None, f"torch: {error}"
    if not settings.emulated and not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no GPU"
    return torch, ""


def torch_device(settings: Settings) -> str:
    """Returns torch's device; the CPU in emulation, so that the code runs."""
    return "cpu" if settings.emulated else "cuda"


def time_torch(settings: Settings, calls: Sequence[Callable[[], object]]) -> float:
    """Returns the milliseconds of a call, the median of several replays of all of `calls` in turn.

    Give one call per set of operands, and more sets than the cache holds.
    """
    import torch

    for call in calls:
        call()
    if settings.emulated:
        start = time.perf_counter()
        for call in calls:
            call()
        return max(1e-6, (time.perf_counter() - start) * 1e3 / len(calls))
    torch.cuda.synchronize()
    replay, count = _replay(calls)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    stop = time.monotonic() + 0.25
    while len(times) < 3 or (len(times) < 40 and time.monotonic() < stop):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


def _replay(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], int]:
    """Captures all calls, repeated if they are few, in one graph; without graphs returns them."""
    import torch

    repeats = max(1, 32 // len(calls))

    def all_calls() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
    except RuntimeError:  # a call waits or allocates
        torch.cuda.synchronize()
        return all_calls, repeats * len(calls)
    return graph.replay, repeats * len(calls)
