"""Blocking readers of a reply: a stream, which stops it when it is closed, and followers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from lmchat.errors import InvalidRequest
from lmchat.forks import watch
from lmchat.generation.parts import Cursor, Delta, Part, PartsLog, Progress
from lmchat.generation.reply import Reply
from lmchat.store.turns import Turn
from turbomind.closing import Closing


class GenerationApi(Protocol):
    """A reply that is being generated, in this process or by a server."""

    log: PartsLog

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that the reply becomes; None without a session, and before the start."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    @property
    def cancelled(self) -> bool:
        """Whether a caller has asked it to stop."""

    def cancel(self) -> None:
        """Requests that it stops. Never waits."""

    def wait(self) -> None:
        """Waits for the end."""

    def result(self) -> Reply:
        """Waits for the end and returns the reply.

        Raises:
            Error: it failed before its first token.
        """

    def follow(self) -> Follower:
        """Returns a reader of the reply, which has all of it so far."""


class Reading:
    """Stops what a call has begun to generate when Ctrl-C ends the call.

    That can come at any place between the start of a generation and the return of its stream or
    reply, where nobody else knows of it. `with` encloses the call; each thread has its own.
    """

    def __init__(self) -> None:
        self._calls = threading.local()

    def begins(self, stop: Callable[[KeyboardInterrupt], object]) -> None:
        """Records, before the current call of this thread begins a generation, how to stop it.
        Outside of a call it does nothing."""
        if hasattr(self._calls, "stop"):
            self._calls.stop = stop

    def __enter__(self) -> None:
        self._calls.stop = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop = self._calls.__dict__.pop("stop", None)
        if stop is not None and isinstance(error, KeyboardInterrupt):
            stop(error)


class _Parts(Closing):
    """Iterates over the parts of a log and over the text in them."""

    def __init__(self, cursor: Cursor) -> None:
        watch(self)
        self._cursor = cursor
        self._log = cursor.log
        self._pending: list[Part] = []

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        return self._log.reply

    def events(self) -> Iterator[Delta | Progress]:
        """Yields all parts: text, reasoning, and the progress of the prompt."""
        while (part := self._next()) is not None:
            yield part

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while (part := self._next()) is not None:
            if isinstance(part, Delta) and part.kind == "text" and part.text and not part.choice:
                return part.text
        raise StopIteration

    def _next(self) -> Part | None:
        if not self._pending:
            self._log.wait_for(self._is_ready)
            self._pending = self._cursor.take()[::-1]
        if self._pending:
            return self._pending.pop()
        self._at_end()
        return None

    def _is_ready(self) -> bool:
        return self._cursor.has_parts or self._log.done

    def _at_end(self) -> None:
        self._log.result()  # raises if the generation failed before its first token

    def close(self) -> None:
        """Ends the reading."""


class ReplyStream(_Parts):
    """The text of a reply as it is generated: an iterator and context manager of str.

    With `n` choices, the iterator yields the text of the first one and `events()` those of all.
    Closing it (by `with`, `close()` or by dropping it) stops the generation; the tokens so far are
    stored.
    """

    def __init__(self, generation: GenerationApi) -> None:
        self._generation = generation
        super().__init__(Cursor(generation.log, whole=False))

    def result(self) -> Reply:
        """Waits for the end and returns the reply.

        Raises:
            Error: the generation failed before its first token.
        """
        try:
            self._generation.wait()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._generation.result()

    def stop(self) -> Reply | None:
        """Stops the generation, waits until the turn is committed, and returns the reply."""
        self.close()
        return self.reply

    def close(self) -> None:
        """Stops the generation and waits until the turn is committed. Idempotent."""
        self._generation.cancel()
        self._generation.wait()

    def __del__(self) -> None:
        generation = getattr(self, "_generation", None)
        if generation is not None and not generation.done:
            generation.cancel()


class Follower(_Parts):
    """A reader of a reply that others may read too: an iterator and context manager of str.

    It gets what the reply has so far in a few large parts, then each new part, and of a continued
    reply also what it had before. Closing or dropping it leaves the generation alone. One thread
    reads it; any thread may close it, which ends a wait of the reader.

    Args:
        log: the reply's parts.
        detached: called when it is closed or dropped. It must not wait. None: nothing is called.
    """

    def __init__(self, log: PartsLog, detached: Callable[[], object] | None = None) -> None:
        self._detached = detached
        super().__init__(Cursor(log))
        self._closed = False  # last: a finalizer detaches what was made

    @property
    def done(self) -> bool:
        """Whether the reply has ended. Parts may still be unread."""
        return self._log.done

    @property
    def turn_id(self) -> int | None:
        """Id of the turn that the reply is or becomes; None without a session."""
        return self._log.turn_id

    @property
    def preceding(self) -> tuple[Turn, ...]:
        """The turns before a running reply, its question last. Empty once it has ended, when the
        session has all turns, and behind a server."""
        return self._log.preceding()

    @property
    def dropped(self) -> tuple[Turn, ...]:
        """What was dropped from the prompt before `preceding`, as `SessionApi.dropped`. Reads the
        store. Empty where `preceding` is."""
        return self._log.dropped()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """JSON values by key that are stored with a running reply: with its question if that is
        new, else with the reply."""
        return self._log.metadata

    @property
    def before(self) -> int:
        """Number of the first parts that a continued reply had before."""
        return len(self._log.before)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def is_ready(self) -> bool:
        """Whether a read would not wait: there are parts, or the reply or the reading has ended."""
        return bool(self._pending) or self._is_ready()

    def take(self) -> list[Delta | Progress]:
        """Returns the parts since the last read, without waiting."""
        pending, self._pending = self._pending[::-1], []
        return [] if self._closed else [*pending, *self._cursor.take()]

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Registers a listener, called on any thread when there are new parts or the end, and once
        now. It must not wait. Returns a function that removes it."""
        return self._log.listen(listener)

    def result(self) -> Reply:
        """Waits for the end and returns the reply.

        Raises:
            InvalidRequest: the follower was closed before the end.
            Error: the generation failed before its first token.
        """
        self._log.wait_for(lambda: self._log.done or self._closed)
        if not self._log.done:
            raise InvalidRequest("the follower was closed before the reply ended")
        return self._log.result()

    def _is_ready(self) -> bool:
        return self._closed or super()._is_ready()

    def _next(self) -> Part | None:
        return None if self._closed else super()._next()

    def _at_end(self) -> None:
        if not self._closed:
            super()._at_end()

    def close(self) -> None:
        """Detaches from the reply. Idempotent."""
        if not self._closed:
            self._detach()
            self._log.notify()

    def _detach(self) -> None:
        self._closed = True
        if self._detached is not None:
            self._detached()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._detach()
