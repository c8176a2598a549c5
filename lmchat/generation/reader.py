"""The reader thread, which takes the engine's events for all requests of a `ChatEngine`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from lmchat.generation.interruptible_event import result_of
from lmchat.store.records import Lease
from turbomind import Event, Inbox, Stream

Result = TypeVar("Result")
Tokens = Sequence[tuple[Lease, list[int]]]
Journal = Callable[[Tokens], Mapping[Lease, Exception]]
"""Journals the new tokens of several turns. Returns the error of each turn that failed."""


class Consumer(Protocol):
    """Takes the events of one request."""

    def attach(self, stream: Stream) -> None:
        """Called with the stream of the request. Must not wait."""

    def journal(self, events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Returns tokens to journal before `feed()` shows them, with their lease. Reader thread."""

    def refuse(self, error: Exception) -> None:
        """Called before `feed()` if journalling failed. Those tokens must not be shown. Reader
        thread."""

    def feed(self, events: Sequence[Event]) -> None:
        """Takes the next events. Must not wait and must not raise. Reader thread."""

    def fail(self, error: BaseException) -> None:
        """Called when no more events can be read. Reader thread."""


_step = threading.local()


def after_read(call: Callable[[], object]) -> None:
    """Calls `call` once the events that the reader thread has taken together are passed on; equal
    calls are one. On another thread, calls it now. It must not raise."""
    calls: dict[Callable[[], object], None] | None = getattr(_step, "calls", None)
    if calls is None:
        call()
    else:
        calls[call] = None


class Reader:
    """Passes events to their consumers until `close()`.

    It journals all tokens that arrived together by one call first. Turns are committed on this
    thread, so they end well even if their streams are not read. Work that Ctrl-C must not interrupt
    runs here too, because signals arrive on the main thread.

    Args:
        journal: makes tokens durable. Default: does nothing.
    """

    def __init__(self, journal: Journal = lambda _tokens: {}) -> None:
        self.inbox = Inbox()
        self._journal = journal
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[Stream, Consumer]] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="lmchat-reader", daemon=True)
        self._thread.start()

    def watch(self, make: Callable[[], Stream], consumer: Consumer) -> None:
        """Makes a stream with this reader's inbox and passes its events to `consumer`."""
        with self._lock:  # events of a stream wait here until it is in the table
            stream = make()
            consumer.attach(stream)
            self._watched[stream.id] = (stream, consumer)

    def later(self, work: Callable[[], object]) -> None:
        """Posts `work`, which must not raise, to the reader thread, in order.

        Once that thread has ended, the caller runs it. Never waits and takes no Python lock, so any
        thread and finalizer may call it.
        """
        self._calls.append(work)
        self.inbox.wake()
        if self._ended:
            self._do_calls()

    def call(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the reader thread and waits. Returns its result, or raises its error.

        The caller must not hold a lock that `work` takes.
        """
        if threading.current_thread() is self._thread:
            return work()
        return result_of(work, self.later)

    def close(self) -> None:
        """Waits until all watched requests have ended, then ends the thread."""
        self._closing = True
        self.inbox.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            ids = self.inbox.wait(None)
            self._do_calls()
            with self._lock:
                found = {i: self._watched[i] for i in ids if i in self._watched}
            self._read(found)
            found = {}
            with self._lock:
                if self._closing and not self._watched:
                    break
        self._ended = True
        self._do_calls()

    def _do_calls(self) -> None:
        while self._calls:
            try:
                work = self._calls.popleft()
            except IndexError:  # another thread runs calls too
                return
            work()

    def _read(self, found: Mapping[int, tuple[Stream, Consumer]]) -> None:
        """Passes the events of these requests to their consumers, once they are journalled."""
        polled: list[tuple[Stream, Consumer, list[Event]]] = []
        for stream, consumer in found.values():
            try:
                polled.append((stream, consumer, stream.poll()))
            except Exception as error:
                stream.cancel()
                consumer.fail(error)
                self._forget(stream)
        self._journal_tokens(polled)
        calls = _step.calls = {}
        try:
            for stream, consumer, events in polled:
                consumer.feed(events)
                if stream.done:
                    self._forget(stream)
        finally:
            _step.calls = None
            for call in calls:
                call()

    def _journal_tokens(self, polled: Sequence[tuple[Stream, Consumer, list[Event]]]) -> None:
        entries: dict[Lease, tuple[Consumer, list[int]]] = {}
        for _, consumer, events in polled:
            entry = consumer.journal(events)
            if entry is not None:
                entries[entry[0]] = (consumer, entry[1])
        if entries:
            failed = self._journal([(lease, ids) for lease, (_, ids) in entries.items()])
            for lease, error in failed.items():
                entries[lease][0].refuse(error)

    def _forget(self, stream: Stream) -> None:
        with self._lock:
            del self._watched[stream.id]
