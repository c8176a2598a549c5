"""The one thread that reads what the engine has produced, for all requests of a `ChatEngine`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from turbomind import Event, Inbox, Stream


class Consumer(Protocol):
    """Who takes the events of one request."""

    def attach(self, stream: Stream) -> None:
        """The engine has the request. Must not wait."""

    def feed(self, events: Sequence[Event]) -> None:
        """Reader thread. Must not wait and must not raise."""

    def fail(self, error: BaseException) -> None:
        """Reader thread: no more events can be read."""


class Reader:
    """Hands events to their consumers until `close()`.

    A turn is committed by this thread, so it ends well even when nobody reads its stream. Whatever
    must not be cut in two by Ctrl-C is done by it as well: signals are the main thread's.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
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

    def call(self, work: Callable[[], object]) -> None:
        """The reader thread does `work`; waits for it and raises what it raises."""
        if threading.current_thread() is self._thread:
            work()
            return
        errors: list[BaseException] = []
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        self.later(run)
        done.acquire()
        if errors:
            raise errors[0]

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
            for request_id, (stream, consumer) in found.items():
                if self._read(stream, consumer):
                    with self._lock:
                        del self._watched[request_id]
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

    def _read(self, stream: Stream, consumer: Consumer) -> bool:
        """Hands over what there is of one request; whether that was all."""
        try:
            events = stream.poll()
        except Exception as error:
            stream.cancel()
            consumer.fail(error)
            return True
        consumer.feed(events)
        return stream.done
