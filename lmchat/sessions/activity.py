"""Activity of a session: its state and its current generation."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lmchat.errors import NotFound, SessionBusy
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.state import State, move


class Activity:
    """State and generation of one session, for any thread. `lock` is the session's lock.

    Args:
        name: returns the session's name, for messages.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self.lock = threading.RLock()
        self.state = State.IDLE
        self.generation: Generation | None = None
        """Current generation, or None."""
        self._name = name

    @property
    def ending(self) -> Generation | None:
        """Current generation if it was asked to stop and has not ended, else None."""
        generation = self.generation
        return generation if generation is not None and generation.cancelled else None

    def settle(self) -> None:
        """Waits for the end of a generation that was asked to stop."""
        generation = self.ending
        if generation is not None:
            generation.cancel()  # again, because the first request may have been interrupted
            generation.wait()

    def stop(self) -> Reply | None:
        """Stops the current generation and waits until its turn is committed. Returns None without
        one."""
        generation = self.generation
        if generation is None:
            return None
        generation.cancel()
        generation.wait()
        return generation.reply

    def begin(self, generation: Generation) -> None:
        """Starts a generation; a call of `ended()` must follow.

        Raises:
            SessionBusy: another generation has not ended.
            NotFound: the session is closed.
        """
        with self.lock:
            self.check_idle("generate")
            self.generation = generation
            self.state = move(self.state, State.QUEUED)

    def moved(self, state: State) -> None:
        """Records a new state of the generation."""
        with self.lock:
            self.state = move(self.state, state)

    def ended(self) -> None:
        """Records that the generation has ended."""
        with self.lock:
            if self.state is not State.IDLE:
                self.state = move(self.state, State.IDLE)
            self.generation = None

    def check_open(self) -> None:
        """Raises NotFound if the session is closed."""
        if self.state is State.CLOSED:
            raise NotFound(f"session {self._name()!r} is closed")

    def check_idle(self, verb: str) -> None:
        """Raises SessionBusy while a reply is being generated, NotFound if the session is
        closed."""
        self.check_open()
        if self.state is not State.IDLE:
            raise SessionBusy(
                f"cannot {verb}: session {self._name()!r} is generating ({self.state}); "
                "stop it first"
            )
