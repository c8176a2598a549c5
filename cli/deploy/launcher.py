"""The launcher: starts replicas and proxy, reports on them, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from lmchat.errors import Error, InvalidRequest
from lmchat.server.config import ServerConfig

from .placement import LAST_SECONDS, Place
from .process import Process
from .proxy import check, configuration, drain, resume, socket_of, wait_until_up
from .registry import CONTROL

_PATIENCE = 5.0  # seconds for one check, and for the proxy's last bytes
_RUNNING = re.compile(r"^lmchat:num_requests_running\{.*\} (\S+)$", re.MULTILINE)


class Replica:
    """One `lmchat serve` or `lmchat web` on a Unix socket.

    Args:
        number: its number, from 1.
        folder: the launcher's private folder.
        arguments: its command line after `lmchat`.
        place: what it computes on.
        key: an API key, if one is needed.
    """

    def __init__(
        self, number: int, folder: Path, arguments: Sequence[str], place: Place, key: str | None
    ) -> None:
        path = socket_of(folder, number)
        self.process = Process(
            f"replica {number}",
            [*place.command(arguments), f"--uds={path}"],
            self._check,
            cpus=place.cpus,
            environment={**os.environ, **place.environment},
        )
        self._number, self._place = number, place
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_PATIENCE,
        )

    async def report(self) -> dict[str, Any]:
        """Returns the replica's part of the status. `running` is null while it does not answer."""
        running = None
        with contextlib.suppress(httpx.HTTPError):
            found = _RUNNING.search((await self._client.get("/metrics")).text)
            running = int(float(found[1])) if found else None
        return {
            "replica": self._number,
            "pid": self.process.pid,
            "state": self.process.state,
            "device": self._place.device,
            "restarts": self.process.restarts,
            "running": running,
        }

    async def _check(self) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return "ready" if (await self._client.get("/ready")).is_success else "draining"
        return ""


class Launcher:
    """One deployment, from its start to its end.

    Args:
        folder: its private folder.
        haproxy: the program.
        bound: the bound socket of its address.
        replicas: its replicas.
        config: the configuration of each replica.
        web: whether they serve the chat page.
    """

    def __init__(
        self,
        folder: Path,
        haproxy: str,
        bound: socket.socket,
        replicas: Sequence[Replica],
        config: ServerConfig,
        web: bool,
    ) -> None:
        self._folder, self._bound, self._replicas = folder, bound, replicas
        self._drain_seconds = config.drain_seconds
        file = folder / "haproxy.cfg"
        address, port = f"fd@{bound.fileno()}", bound.getsockname()[1]
        file.write_text(configuration(folder, len(replicas), address, port, config, web))
        # SIGUSR1: it takes no more connections, and ends with its last one.
        self._proxy = Process(
            "the proxy",
            [haproxy, "-db", "-q", "-f", str(file)],
            functools.partial(check, folder),
            last_signal=signal.SIGUSR1,
            descriptors=[bound.fileno()],
        )
        self._stopping = asyncio.Event()
        self._restarting = asyncio.Lock()

    async def run(self, about: dict[str, Any], opened: Callable[[], object]) -> None:
        """Serves until a signal or a request to stop.

        Args:
            about: the status without that of the replicas.
            opened: called once requests are accepted.

        Raises:
            InternalError: a process ended before it was ready.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            verb, *words = (await reader.readline()).decode().split()
            if verb == "stop":
                self._stop()
                if words:
                    self._stop()
                return  # the connection stays open until the launcher ends
            if verb == "restart":
                await self._restart(list(map(int, words)), writer)
            else:
                parts = await asyncio.gather(*(replica.report() for replica in self._replicas))
                writer.write(json.dumps(about | {"replicas": parts}).encode())
            writer.close()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        server = await asyncio.start_unix_server(answer, self._folder / CONTROL)
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._stopping.wait(),
                self._open(opened),
                *(replica.process.supervise() for replica in self._replicas),
            )
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._end()
        server.close()
        for task in done:
            task.result()

    async def _restart(self, numbers: list[int], writer: asyncio.StreamWriter) -> None:
        """Restarts replicas, all without numbers, one after the other. Writes a line of JSON for
        each step, and one with `error` at the end: a message, or null."""

        def tell(**line: str | None) -> None:
            writer.write(json.dumps(line).encode() + b"\n")

        count = len(self._replicas)
        try:
            if wrong := [n for n in numbers if not 1 <= n <= count]:
                raise InvalidRequest(f"replica is {wrong[0]}, expected 1 to {count}")
            if self._restarting.locked() or not self._proxy.was_ready.is_set():
                raise InvalidRequest("the deployment starts or restarts, expected it to be ready")
            async with self._restarting:
                if count == 1:
                    tell(step="there is one replica: requests get 503 until it is ready again")
                for number in numbers or range(1, count + 1):
                    await self._restart_one(number, tell)
            tell(error=None)
        except (Error, OSError) as error:
            tell(error=str(error))

    async def _restart_one(self, number: int, tell: Callable[..., None]) -> None:
        tell(step=f"replica {number}: draining for at most {self._drain_seconds:g} s")
        await drain(self._folder, number)
        try:
            process = self._replicas[number - 1].process
            await process.restart(self._drain_seconds + LAST_SECONDS)
        finally:
            await resume(self._folder, number)
        await wait_until_up(self._folder, number)
        tell(step=f"replica {number}: ready, process {process.pid}")

    async def _open(self, opened: Callable[[], object]) -> None:
        """Runs the proxy once all replicas are ready."""
        for replica in self._replicas:
            await replica.process.was_ready.wait()

        async def announce() -> None:
            await self._proxy.was_ready.wait()
            opened()

        await asyncio.gather(self._proxy.supervise(), announce())

    async def _end(self) -> None:
        """Closes the address, and then ends the replicas as `lmchat serve` does."""
        self._bound.close()
        self._proxy.end(signal.SIGUSR1)
        processes = [replica.process for replica in self._replicas]
        for process in processes:
            process.end(signal.SIGTERM)
        patience = self._drain_seconds + LAST_SECONDS
        await asyncio.gather(*(process.ended(patience) for process in processes))
        await self._proxy.ended(_PATIENCE)

    def _stop(self) -> None:
        """Ends the deployment; at the second call at once. Shown tokens are in the journal."""
        if self._stopping.is_set():
            for replica in self._replicas:
                replica.process.end(signal.SIGKILL)
        self._stopping.set()
