"""A server on a loopback port in a thread of the test's process, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx
import uvicorn

from lmchat import AsyncChatEngine
from lmchat.generation.ticket import Ticket
from lmchat.server import MountedApp, ServerConfig, create_app
from lmchat.server.http.process import uvicorn_config

Result = TypeVar("Result")


class RunningServer:
    """A server of memo that runs from `__enter__` to `__exit__`.

    Args:
        config: the server's configuration; None: the defaults.
        model: the model.
        mounts: further apps.
        options: those of `AsyncChatEngine`; sessions are in memory by default.
    """

    def __init__(
        self,
        config: ServerConfig | None = None,
        model: str = "memo",
        mounts: tuple[MountedApp, ...] = (),
        **options: Any,
    ) -> None:
        self.config = config or ServerConfig()
        self.engine = AsyncChatEngine(model, **{"store": "memory", **options})
        self._mounts = mounts
        self._thread = threading.Thread(target=self._run, name="test-server", daemon=True)
        self._started = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._error: BaseException | None = None
        self._clients: list[httpx.Client] = []
        self.port: int = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        """Returns a client of the server, with an API key. It is closed together with the
        server."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)
        self._clients.append(client)
        return client

    @contextlib.contextmanager
    def taken_slot(self, owner: str) -> Iterator[Callable[[], None]]:
        """Takes a slot of the batch, as a generation of the owner does that does not end. Yields a
        function that frees it."""
        admission = self.engine.sync._runtime.admission
        ticket = Ticket(owner, live=False, cost=1, start=lambda: None)
        admission.enter(ticket)
        try:
            yield functools.partial(admission.leave, ticket)
        finally:
            admission.leave(ticket)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits `work` on the server's loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self._started.wait(60)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with self.engine:
            self.app = create_app(self.engine, self.config, mounts=self._mounts)
            self.uvicorn = uvicorn.Server(uvicorn_config(self.app, self.config))
            serving = asyncio.ensure_future(self.uvicorn.serve([self._socket]))
            while not self.uvicorn.started and not serving.done():
                await asyncio.sleep(0.01)
            self._started.set()
            await serving
