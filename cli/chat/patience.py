"""How long a chat waits for its server, which may hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from lmchat.errors import Unreachable

STOP_SECONDS = 1.8
LEAVE_SECONDS = 1.5


class GivenUp(Unreachable):
    """The chat no longer waits for a server that does not answer."""


class Patience:
    """The time that a chat waits for a server: after Ctrl-C, and in all when the chat ends.

    Args:
        stop: Seconds from Ctrl-C until a reply is given up. None: the engine is of this process,
            which is waited for without a limit.
        leave: Seconds that all calls of `leave()` take together, at most.
    """

    def __init__(self, stop: float | None = None, leave: float = LEAVE_SECONDS) -> None:
        self.stop = stop
        self.left = None if stop is None else leave
        """Seconds that are left to end the chat; None: no limit."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        return self.left == 0

    def give_up(self) -> None:
        """Ends the waiting: the server has not answered."""
        self.left = 0

    def leave(self, work: Callable[[], object]) -> None:
        """Runs `work`, which is part of leaving.

        With a limit it runs on another thread, which is left alone at the limit, and its errors are
        dropped.
        """
        if self.left is None:
            work()
            return

        def run() -> None:
            with contextlib.suppress(Exception):
                work()

        begin = time.monotonic()
        thread = threading.Thread(target=run, name="lmchat-leave", daemon=True)
        thread.start()
        thread.join(self.left)
        self.left = max(0.0, self.left - (time.monotonic() - begin))
