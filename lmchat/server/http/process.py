"""Runs the app: sockets, the HTTP protocol, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn

from lmchat.aio.engine import AsyncChatEngine
from lmchat.server.config import ServerConfig
from lmchat.server.http.guard import Guard
from lmchat.server.http.notify import report_ready
from lmchat.server.http.protocol import Connections, HttpProtocol
from lmchat.server.http.sockets import keep_listening
from lmchat.server.metrics import queue_of
from lmchat.server.retries.entries import Entries
from lmchat.server.signals import ending_signals
from lmchat.server.state import ServerState

log = logging.getLogger("lmchat.server")

_LAST_SECONDS = 2  # for responses after the engine has stopped their generations
_LOOK_SECONDS = 0.05  # between looks whether the last generation has ended
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE = 1 << 20  # bytes of a buffer that is returned to the system when it is freed


def uvicorn_config(
    app: Guard,
    config: ServerConfig,
    connections: Connections | None = None,
    **address: Any,
) -> uvicorn.Config:
    """Returns uvicorn's configuration for the app.

    Args:
        app: the app of `create_app()`.
        config: the server's configuration.
        connections: where connections are registered; None: nothing else needs them.
        address: `host` and `port`, or `uds`. None: sockets are passed to `serve()`.
    """
    responded, root_path = app.state.metrics.responded, config.root_path
    group = connections or Connections(config.limits, responded, root_path)
    # uvicorn logs invalid requests and whole paths. Errors that are bugs are logged by `errors`.
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).disabled = True
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", functools.partial(HttpProtocol, group=group)),
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=512,
        timeout_keep_alive=cast(int, config.limits.idle_seconds),
        timeout_graceful_shutdown=_LAST_SECONDS,
        **address,
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server from its start to its end.

    Args:
        app: the app of `create_app()`.
        engine: its engine, which is closed at the end.
        bound: bound sockets, several only of TCP.
    """

    def __init__(self, app: Guard, engine: AsyncChatEngine, bound: Sequence[socket.socket]) -> None:
        self._state: ServerState = app.state
        self._engine = engine
        self._bound = bound
        config = self._state.config
        self._connections = Connections(
            config.limits, self._state.metrics.responded, config.root_path
        )
        self._uvicorn = _Uvicorn(uvicorn_config(app, config, self._connections))
        self._ending = asyncio.Event()

    async def run(self, ready: Callable[[], object] = lambda: None) -> None:
        """Serves until SIGTERM, SIGINT or SIGHUP, and then until running generations have ended.

        Args:
            ready: called once requests are accepted.

        Raises:
            OSError: the socket cannot listen.
        """
        for one in self._bound:
            one.listen(512)
        with self._signals():
            serving = asyncio.ensure_future(self._uvicorn.serve(list(self._bound)))
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._uvicorn.started:
                gc.collect()
                gc.freeze()  # a collection looks at some 100,000 objects of the modules otherwise
                return_large_buffers()
                ready()
            beside = [asyncio.ensure_future(work) for work in (report_ready(), self._stay())]
            ending = asyncio.ensure_future(self._ending.wait())
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not serving.done():
                await self._drain()
            self._state.part(Entries).flush()  # before the store is closed
            await self._engine.close()
            for task in beside:
                task.cancel()
            self._uvicorn.should_exit = True
            await serving

    async def _stay(self) -> None:
        """Keeps a Unix socket at its path."""
        first = self._bound[0]
        if first.family != socket.AF_UNIX:
            return

        async def listen(bound: socket.socket) -> None:
            config, uvicorn = self._uvicorn.config, self._uvicorn
            protocol = functools.partial(
                cast(Any, config.http_protocol_class),
                config=config,
                server_state=uvicorn.server_state,
                app_state=uvicorn.lifespan.state,
            )
            loop = asyncio.get_running_loop()
            server = await loop.create_server(protocol, sock=bound, backlog=config.backlog)
            uvicorn.servers.append(server)
            log.warning("the socket %s was removed: made again", first.getsockname())

        await keep_listening(first.getsockname(), listen)

    async def _drain(self) -> None:
        """Waits for running generations, at most `drain_seconds`."""
        state, loop = self._state, asyncio.get_running_loop()
        state.draining = True
        self._connections.close_idle()
        deadline = loop.time() + state.config.drain_seconds
        if self._is_busy():
            log.info(
                "shutting down: waiting at most %.0f s for %d requests; a second signal exits at "
                "once", state.config.drain_seconds, self._busy(),
            )  # fmt: skip
        while self._is_busy() and loop.time() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_busy(self) -> bool:
        return self._busy() > 0

    def _busy(self) -> int:
        """Returns the number of requests, and of generations that no request waits for."""
        queue = queue_of(self._engine.sync)
        return max(self._state.in_flight, int(queue["running"]) + int(queue["waiting"]))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = ending_signals()
        for number in handled:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _take(self, number: int) -> None:
        """Ends the server; at the second signal, the process. Shown tokens are in the journal."""
        if self._ending.is_set() and number != signal.SIGHUP:
            os._exit(128 + number)
        self._ending.set()


def return_large_buffers() -> None:
    """Makes the C library return large buffers to the system as soon as they are freed.

    After the first ones it keeps those of up to 32 MiB for each thread, which added 300 MiB for
    bodies of 8 MiB.
    """
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
