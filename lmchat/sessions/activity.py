"""What a session is doing: its state, and the one generation that may be under way."""

from __future__ import annotations

import threading

from lmchat.errors import NotFound, SessionBusy
from lmchat.generation.generation import Generation, Reply
from lmchat.generation.state import State, move
from lmchat.store.records import SessionRecord


class Activity:
    """Of one session. `lock` is the session's; any thread."""

    def __init__(self, record: SessionRecord) -> None:
        self.lock = threading.RLock()
        self.state = State.IDLE
        self.generation: Generation | None = None
        """The one under way."""
        self._record = record

    @property
    def ending(self) -> Generation | None:
        """One that was asked to stop and has not ended yet."""
        generation = self.generation
        return generation if generation is not None and generation.cancelled else None

    def settle(self) -> None:
        """Waits for one that was asked to stop."""
        generation = self.ending
        if generation is not None:
            generation.cancel()  # once more: whoever asked may have been interrupted
            generation.wait()

    def stop(self) -> Reply | None:
        """Stops the one under way and returns when its turn is committed; None: there is none."""
        generation = self.generation
        if generation is None:
            return None
        generation.cancel()
        generation.wait()
        return generation.reply

    def begin(self, generation: Generation) -> None:
        """One begins: from here on `ended()` must follow. SessionBusy, NotFound."""
        with self.lock:
            self.check_idle("generate")
            self.generation = generation
            self.state = move(self.state, State.QUEUED)

    def moved(self, state: State) -> None:
        """It has come so far."""
        with self.lock:
            self.state = move(self.state, state)

    def ended(self) -> None:
        """It has ended."""
        with self.lock:
            if self.state is not State.IDLE:
                self.state = move(self.state, State.IDLE)
            self.generation = None

    def check_open(self) -> None:
        """NotFound after the close."""
        if self.state is State.CLOSED:
            raise NotFound(f"session {self._record.name!r} is closed")

    def check_idle(self, verb: str) -> None:
        """SessionBusy while something is generated, NotFound after the close."""
        self.check_open()
        if self.state is not State.IDLE:
            raise SessionBusy(
                f"cannot {verb}: session {self._record.name!r} is generating ({self.state}); "
                "stop it first"
            )
