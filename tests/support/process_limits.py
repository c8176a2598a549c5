"""Limits of this process that a test lowers, while no other thread starts a program under them."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator

starting = threading.Lock()
"""Held while limits are lowered, and by threads in the background while they start a program."""


@contextlib.contextmanager
def lowered(kind: int, limit: int) -> Iterator[None]:
    """Lowers a limit of the process, such as RLIMIT_NOFILE, and restores it at the end.

    The limit may be changed within; a program that another thread starts never has it.
    """
    with starting:
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(kind, (soft, hard))
