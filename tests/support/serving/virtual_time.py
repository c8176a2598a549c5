"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    loop = None

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing is scheduled: the program would wait for ever")
        if not ready:
            self.loop.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that starts at time 0."""

    def __init__(self):
        self._now = 0.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self._now

    def advance(self, seconds):
        """Moves the clock, as work that keeps the loop busy does."""
        self._now += seconds


def run(main):
    """Runs a coroutine function to its end in virtual time; returns its result.

    Args:
        main: Receives the loop.
    """
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
