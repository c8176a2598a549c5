"""The threads in which the asyncio API waits, so that the loop never does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from lmchat.errors import EngineClosed
from turbomind.config.limits import explain_limits

Face = TypeVar("Face")
P = ParamSpec("P")
R = TypeVar("R")

THREADS = 64
"""Calls that can wait at once. They wait for the store, templates and the engine, and compute
little; asyncio's own executor has 6 threads on 2 cores."""


READY = 4
"""Threads of an engine that has started: so many calls are served whatever the system refuses."""


class _Executor(ThreadPoolExecutor):
    """Goes on with the threads that it has where the system refuses another."""

    def start_threads(self, count: int) -> None:
        gate = threading.Event()
        waiting = [self.submit(gate.wait) for _ in range(count)]
        gate.set()
        wait(waiting)
        if len(self._threads) < count:
            raise RuntimeError("can't start new thread")

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


class Threads:
    """An executor of one engine. Its threads start when they are needed.

    Args:
        count: most threads.
        name: start of their names.
    """

    def __init__(self, count: int = THREADS, name: str = "lmchat-aio") -> None:
        self._count, self._name = count, name
        self.start_again()
        self.is_closed = False
        """Whether the threads end once their work is done."""

    def start_threads(self, count: int) -> None:
        """Starts threads until there are `count`, so that a limit on tasks is met before anything
        is served.

        Raises:
            InternalError: the system refuses one.
        """
        with explain_limits("the engine"):
            self._executor.start_threads(count)

    async def run(self, verb: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `verb` in a thread and returns its result. Cancelling the await does not stop
        it."""
        return await self.start(functools.partial(verb, *args, **kwargs))

    def start(self, work: Callable[[], R]) -> asyncio.Future[R]:
        """Calls `work` in a thread, with the caller's context variables.

        Raises:
            EngineClosed: the threads have been ended.
            InternalError: there is no thread, and the system refuses one.
        """
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._executor, functools.partial(context.run, work))
        except RuntimeError as error:
            if not self.is_closed:
                with explain_limits("a call"):
                    raise
            raise EngineClosed("the engine has been closed") from error

    def start_again(self) -> None:
        """Replaces the executor, whose threads a forked child does not have."""
        self._executor = _Executor(self._count, thread_name_prefix=self._name)

    def close(self) -> None:
        """Ends the threads once their work is done, without waiting for it."""
        self.is_closed = True
        self._executor.shutdown(wait=False)


shared = Threads()
"""For sessions and streams that are made without an `AsyncChatEngine`."""
os.register_at_fork(after_in_child=shared.start_again)


def in_thread(
    verb: Callable[Concatenate[Face, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns a method of `sync` for asyncio, which runs in another thread because it may wait."""

    @functools.wraps(verb)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        threads: Threads = self._threads
        return await threads.run(verb, self.sync, *args, **kwargs)

    call.__doc__ = inspect.getdoc(verb)  # which may be that of a base
    return call


def same(source: Callable[[Any], R]) -> R:
    """Returns a property with the value that this property of `sync` has. It must not wait."""
    made: Any = property(lambda self: source.__get__(self.sync), doc=inspect.getdoc(source))
    return cast(R, made)
