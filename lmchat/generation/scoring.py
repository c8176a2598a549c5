"""The scores of a prompt: one request that generates nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmchat.errors import EngineClosed, Error, InternalError
from lmchat.forks import watch
from lmchat.generation.generation import as_error
from lmchat.generation.interruptible_event import InterruptibleEvent
from lmchat.generation.ticket import Ticket
from lmchat.store.records import Lease
from turbomind import Event, Stream

if TYPE_CHECKING:
    from lmchat.sessions.runtime import Runtime


class Scoring:
    """Computes the log-probabilities of a prompt's tokens.

    Args:
        runtime: the engine and its threads.
        token_ids: the prompt.
        owner: the owner, whose salt the pages have.
        begins: called before the request is queued. It may raise.
        ended: called when it has ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        token_ids: Sequence[int],
        owner: str,
        begins: Callable[[Scoring], None],
        ended: Callable[[Scoring], None],
    ) -> None:
        watch(self)
        self._runtime = runtime
        self._token_ids = list(token_ids)
        self._begins, self._ended = begins, ended
        later = runtime.reader.later  # a slot is freed and a request refused on any thread
        self._ticket = Ticket(
            owner,
            live=False,
            cost=max(1, len(self._token_ids)),
            start=functools.partial(later, self._post),
            refused=lambda error: later(functools.partial(self._end, error)),
            reprioritize=self._set_priority,
            limit=0,
        )
        self._changed = InterruptibleEvent()
        self._listeners: list[Callable[[], None]] = []
        self._stream: Stream | None = None
        self._priority: int | None = None  # in the engine, if it was changed
        self._error: Error | None = None
        self._done = False
        self._cancelled = False
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Queues the request, or sends it at once.

        Raises:
            Overloaded: the queue is full.
        """
        try:
            self._runtime.reader.call(self._enter)
        except BaseException as error:
            self._runtime.reader.call(functools.partial(self._abort, error))
            raise

    def _abort(self, error: BaseException) -> None:
        self._cancelled = True
        if self._stream is not None:  # it had started before an interrupt
            self._stream.cancel()
        else:
            self._runtime.admission.withdraw(self._ticket)
            self._end(as_error(error))

    def _enter(self) -> None:
        self._begins(self)
        self._runtime.admission.enter(self._ticket)

    def _post(self) -> None:
        start = functools.partial(
            self._runtime.core.start_score,
            self._token_ids,
            inbox=self._runtime.reader.inbox,
            priority=self._ticket.priority,
            salt=self._ticket.owner,
        )
        try:
            self._runtime.reader.watch(start, self)
        except Exception as error:
            self._end(as_error(error))

    # --- events, on the reader thread ------------------------------------------------------------

    def attach(self, stream: Stream) -> None:
        """Records the stream of the request."""
        self._stream = stream
        if self._priority is not None:
            stream.set_priority(self._priority)
        if self._cancelled:
            stream.cancel()

    def journal(self, _events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Returns None: there is nothing to journal."""
        return None

    def refuse(self, _error: Exception) -> None:
        """Does nothing: there is nothing to journal."""

    def feed(self, events: Sequence[Event]) -> None:
        """Takes the next events of the request."""
        for event in events:
            if event.terminal:
                error = event.error
                if event.finish_reason == "cancelled":
                    error = EngineClosed("the request for scores was cancelled")
                elif event.finish_reason == "error" and error is None:
                    error = InternalError("the request failed without a reason")
                self._end(error)

    def fail(self, error: BaseException) -> None:
        """Ends with an error."""
        self._end(as_error(error))

    def _end(self, error: Error | None) -> None:
        if self._done:
            return
        self._ended(self)
        if error is None:
            self._runtime.admission.scored(self._ticket)
        self._runtime.admission.leave(self._ticket)
        with self._lock:
            self._error, self._done = error, True
            listeners, self._listeners = self._listeners, []
        self._changed.set()
        for listener in listeners:
            listener()

    # --- any thread ------------------------------------------------------------------------------

    def _set_priority(self, priority: int) -> None:
        self._priority = priority
        if self._stream is not None:
            self._stream.set_priority(priority)

    def cancel(self) -> None:
        """Requests that it stops. Never waits."""
        self._cancelled = True
        self._runtime.reader.later(self._cancel)

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        elif self._runtime.admission.withdraw(self._ticket):
            self._end(EngineClosed("the request for scores was cancelled"))

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` at the end, on any thread; at once if it has ended."""
        with self._lock:
            if not self._done:
                self._listeners.append(listener)
                return
        listener()

    def wait(self) -> None:
        """Waits for the end."""
        self._changed.wait_for(lambda: self._done)

    def result(self) -> list[float]:
        """Waits for the end and returns len(prompt) - 1 natural logarithms.

        Raises:
            Error: the request failed.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._stream is not None
        return self._stream.request.scores()
