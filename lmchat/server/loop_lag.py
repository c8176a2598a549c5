"""Measures how late the event loop runs what is due: the delay that every request sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

INTERVAL = 0.1
"""Time between measurements, in seconds."""


@contextlib.contextmanager
def watched(report: Callable[[float], object]) -> Iterator[None]:
    """Calls `report` with the lag of the running loop, in seconds, at each interval."""
    loop = asyncio.get_running_loop()
    due = loop.time() + INTERVAL
    timer: asyncio.TimerHandle

    def measure() -> None:
        nonlocal due, timer
        now = loop.time()
        report(max(0.0, now - due))
        due = now + INTERVAL
        timer = loop.call_at(due, measure)

    timer = loop.call_at(due, measure)
    try:
        yield
    finally:
        timer.cancel()
