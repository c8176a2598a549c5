"""Signs of life of a process, and waits that end.

Not here: what follows from their absence (`process`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def work_of(pid: int) -> int | None:
    """Returns the nanoseconds that all threads of a process have run; None if that is unknown.

    While the number stays the same, none of its threads has run: it is stopped, or all of them wait
    for something that does not come.
    """
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(text.split()[0]) for text in texts) if texts else None
    except (OSError, ValueError, IndexError):  # such as a thread that has just ended
        return None


class Silence:
    """How long there has been no sign of life.

    It takes a number of looks as well as a time: a watcher that was stopped itself has looked at
    nothing in that time.
    """

    def __init__(self, seconds: float, looks: int) -> None:
        self._seconds, self._most = seconds, looks
        self._since, self._looks = asyncio.get_running_loop().time(), 0

    def end(self) -> None:
        """Begins again: there was a sign of life."""
        self._since, self._looks = asyncio.get_running_loop().time(), 0

    def is_over(self) -> bool:
        """Counts a look without a sign of life, and returns whether that was too long."""
        self._looks += 1
        return self._looks >= self._most and self.lasted >= self._seconds

    @property
    def lasted(self) -> float:
        """The seconds since the last sign of life."""
        return asyncio.get_running_loop().time() - self._since


class Idleness:
    """How long no thread of a process has run.

    Args:
        pid: the process.
        seconds: time after which that is too long.
        looks: and number of looks.
    """

    def __init__(self, pid: int, seconds: float, looks: int) -> None:
        self._pid, self._work = pid, work_of(pid)
        self._silence = Silence(seconds, looks)

    def is_over(self) -> bool:
        """Looks at the process, and returns whether it has done nothing for too long."""
        before, self._work = self._work, work_of(self._pid)
        if self._work is not None and self._work == before:
            return self._silence.is_over()
        self._silence.end()
        return False


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine.

    asyncio.wait_for() of Python 3.11 loses a cancellation that comes with the result.

    Raises:
        TimeoutError: it takes longer.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError(f"no answer for {seconds:g} s")
        return task.result()
    finally:
        task.cancel()
