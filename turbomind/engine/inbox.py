"""An inbox: one thread that reads the events of many requests."""

from __future__ import annotations

import math
import select
from typing import NoReturn

import turbomind._C as _C
from turbomind.params import wrong

_LONGEST = 1e6  # seconds; poll() takes milliseconds of 32 bits


class Inbox:
    """Reports to one thread which of many streams have new events.

    Pass the inbox as `inbox=` where a stream is made. `wait()` then returns `Stream.id`, and the
    reader calls `Stream.poll()`, which never waits. An id is reported once for all events since its
    last report.

    An id may be reported before the call that makes its stream has returned. A caller with a table
    of streams therefore makes a stream and enters it in the table under one lock, which the reader
    takes to look up ids; making a stream does not wait for the engine. Ids of dropped streams may
    still be reported. Ids are unique within an engine, so each engine needs its own inboxes.
    """

    def __init__(self) -> None:
        self.waker = _C.Waker()
        self._poll = select.poll()
        self._poll.register(self.waker.fd, select.POLLIN)

    def wait(self, seconds: float | None = None) -> list[int]:
        """Waits until streams have new events, without the interpreter's lock.

        One thread at a time may wait. `wake()` ends the wait, at once if it was called before.

        Args:
            seconds: Most seconds to wait, 0 or more. None: no limit.

        Returns:
            Ids of the streams with new events, in order of the events, without repeats. Empty after
            `wake()` or after `seconds`, if there are no events.

        Raises:
            InvalidRequest: `seconds` is not a number of at least 0.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise wrong("seconds", seconds, "a number of at least 0 or None")
        self._poll.poll(None if seconds is None else math.ceil(min(seconds, _LONGEST) * 1000))
        return self.waker.drain()

    def wake(self) -> None:
        """Ends the current or the next `wait()`. Any thread."""
        self.waker.wake()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Inbox cannot be copied or pickled: it owns a file descriptor")
