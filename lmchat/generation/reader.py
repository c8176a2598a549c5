"""The one thread that reads what the engine has produced, for all requests of a `ChatEngine`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from lmchat.store.records import Lease
from turbomind import Event, Inbox, Stream

Result = TypeVar("Result")
Tokens = Sequence[tuple[Lease, list[int]]]
Journal = Callable[[Tokens], Mapping[Lease, Exception]]
"""Keeps the new tokens of several turns; says of which it could not, and why."""


class Consumer(Protocol):
    """Who takes the events of one request."""

    def attach(self, stream: Stream) -> None:
        """The engine has the request. Must not wait."""

    def journal(self, events: Sequence[Event]) -> tuple[Lease, list[int]] | None:
        """Reader thread: what of the events must be kept before anybody sees them."""

    def refuse(self, error: Exception) -> None:
        """Reader thread: that was not kept. `feed()` follows, and must not show it."""

    def feed(self, events: Sequence[Event]) -> None:
        """Reader thread. Must not wait and must not raise."""

    def fail(self, error: BaseException) -> None:
        """Reader thread: no more events can be read."""


class Reader:
    """Hands events to their consumers until `close()`; `journal` is asked first, once for all that
    came together.

    A turn is committed by this thread, so it ends well even when nobody reads its stream. Whatever
    must not be cut in two by Ctrl-C is done by it as well: signals are the main thread's.
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
        """Makes a stream with this reader's inbox, and hands its events to `consumer`."""
        with self._lock:  # news of a stream that is not in the table yet wait here
            stream = make()
            consumer.attach(stream)
            self._watched[stream.id] = (stream, consumer)

    def later(self, work: Callable[[], object]) -> None:
        """The reader thread does `work`, which must not raise, after all that was asked before;
        once that thread has ended, this one does. Never waits and takes no lock of Python's: for
        any thread, and for finalizers."""
        self._calls.append(work)
        self.inbox.wake()
        if self._ended:
            self._do_calls()

    def call(self, work: Callable[[], Result]) -> Result:
        """The reader thread does `work`; waits for it, returns and raises what it does. The caller
        holds no lock that `work` takes."""
        if threading.current_thread() is self._thread:
            return work()
        results: list[Result] = []
        errors: list[BaseException] = []
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        self.later(run)
        done.acquire()
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """Ends the thread once every watched request has ended."""
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
            except IndexError:  # another thread does them too
                return
            work()

    def _read(self, found: Mapping[int, tuple[Stream, Consumer]]) -> None:
        """Hands over what there is of these requests, once it is journalled."""
        polled: list[tuple[Stream, Consumer, list[Event]]] = []
        for stream, consumer in found.values():
            try:
                polled.append((stream, consumer, stream.poll()))
            except Exception as error:
                stream.cancel()
                consumer.fail(error)
                self._forget(stream)
        self._keep(polled)
        for stream, consumer, events in polled:
            consumer.feed(events)
            if stream.done:
                self._forget(stream)

    def _keep(self, polled: Sequence[tuple[Stream, Consumer, list[Event]]]) -> None:
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
