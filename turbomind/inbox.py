"""One reader for the events of many requests."""

from __future__ import annotations

import math
import select
from typing import NoReturn

import turbomind._C as _C
from turbomind.errors import InvalidRequest

_LONGEST = 1e6  # seconds of one poll(), which takes 32-bit milliseconds


class Inbox:
    """Tells one thread which of many streams have news.

    Pass it as `inbox=` where a stream is made; `wait()` then reports `Stream.id` and the reader
    calls `Stream.poll()`, which never waits. An id is reported once for all news since it was last
    reported, and again only when there is more. News may be reported before the call that makes the
    stream has returned: whoever keeps a table of streams makes the stream and enters it under a
    lock that the reader takes to look ids up; making a stream does not wait for the engine. Ids of
    streams that were dropped may still be reported. Ids are unique within an engine; each engine
    needs inboxes of its own.
    """

    def __init__(self) -> None:
        self.waker = _C.Waker()
        self._poll = select.poll()
        self._poll.register(self.waker.fd, select.POLLIN)

    def wait(self, seconds: float | None = None) -> list[int]:
        """Ids of the streams with news, in order of the news, without repeats.

        Blocks without the interpreter's lock until there are some; empty after `wake()` (at once if
        it came before, and unless there are news too) or after `seconds`. None waits for ever. One
        thread at a time. Raises InvalidRequest for what is no number of at least 0.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise InvalidRequest(f"seconds is {seconds!r}, expected a number of at least 0 or None")
        self._poll.poll(None if seconds is None else math.ceil(min(seconds, _LONGEST) * 1000))
        return self.waker.drain()

    def wake(self) -> None:
        """Makes `wait()` return, now or the next time it is called. Any thread."""
        self.waker.wake()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Inbox cannot be copied or pickled: it owns a file descriptor")
