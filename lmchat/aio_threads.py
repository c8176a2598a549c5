"""The threads in which the asyncio API waits, so that the loop never does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from lmchat.errors import EngineClosed

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 64
"""Calls that can wait at once. They wait for the store, templates and the engine, and compute
little; asyncio's own executor has 6 threads on 2 cores."""


class Threads:
    """An executor of one engine. Its threads start when they are needed."""

    def __init__(self, count: int = THREADS) -> None:
        self._count = count
        self.start_again()
        self.is_closed = False
        """Whether the threads end once their work is done."""

    async def run(self, verb: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `verb` in a thread and returns its result. Cancelling the await does not stop
        it."""
        return await self.start(functools.partial(verb, *args, **kwargs))

    def start(self, work: Callable[[], R]) -> asyncio.Future[R]:
        """Calls `work` in a thread, with the caller's context variables.

        Raises:
            EngineClosed: the threads have been ended.
        """
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._executor, functools.partial(context.run, work))
        except RuntimeError as error:
            if not self.is_closed:  # no thread can be started
                raise
            raise EngineClosed("the engine has been closed") from error

    def start_again(self) -> None:
        """Replaces the executor, whose threads a forked child does not have."""
        self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="lmchat-aio")

    def close(self) -> None:
        """Ends the threads once their work is done, without waiting for it."""
        self.is_closed = True
        self._executor.shutdown(wait=False)


shared = Threads()
"""For sessions and streams that are made without an `AsyncChatEngine`."""
os.register_at_fork(after_in_child=shared.start_again)
