"""Slow steps, so that a reply still runs when a test acts on it, however busy the machine is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turbomind import _C


@contextlib.contextmanager
def slow_steps(milliseconds: float = 3.0) -> Iterator[None]:
    """Lets every step of the process's engines begin that much later until the end of the block.

    Small models compute a token in a tenth of a millisecond. A thread of a busy machine may wait
    longer for the processor than such a model takes for a whole reply.
    """
    _C.test_set_step_delay(round(milliseconds * 1000))
    try:
        yield
    finally:
        _C.test_set_step_delay(0)
