"""The launcher: starts replicas and proxy, reports on them, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx

from lmchat.deploy.liveness import within
from lmchat.deploy.placement import LAST_SECONDS, Place
from lmchat.deploy.process import CHECK_SECONDS, Process
from lmchat.deploy.proxy import (
    admin_of,
    check,
    configuration,
    drain,
    resume,
    socket_of,
    wait_until_up,
)
from lmchat.deploy.registry import CONTROL, Claim
from lmchat.deploy.replica import environment
from lmchat.errors import Error, InternalError, InvalidRequest
from lmchat.server.config import ServerConfig
from lmchat.server.http.sockets import BACKLOG, keep_listening, unix_socket
from lmchat.server.signals import ending_signals

log = logging.getLogger("lmchat.deploy")

_PATIENCE = 5.0  # seconds for one check, and for the proxy's last bytes
_REPORT_SECONDS = 2.0  # for a replica's part of the status
_UP_SECONDS = 60.0  # until the proxy has found a new process
_LOOK_SECONDS = 1.0  # between two looks at the folder
_PROXY_TRIES = 3  # before it was ever ready
_RUNNING = re.compile(r"^lmchat:num_requests_running\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Common:
    """What all replicas have in common.

    Attributes:
        folder: the launcher's private folder.
        arguments: their command line, the program first.
        key: the launcher's API key.
        weights: the descriptor of a file with the fingerprint of their weights.
        start_seconds: time in which one has to be ready.
    """

    folder: Path
    arguments: Sequence[str]
    start_seconds: float
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    weights: int = field(default_factory=lambda: os.memfd_create("weights"))


class Replica:
    """One `lmchat serve` or `lmchat web` on a Unix socket.

    Args:
        number: its number, from 1.
        common: what all replicas have in common.
        place: what it computes on.
    """

    def __init__(self, number: int, common: Common, place: Place) -> None:
        path = socket_of(common.folder, number)
        self.process = Process(
            f"replica {number}",
            [*place.command(common.arguments), f"--uds={path}"],
            self._check,
            cpus=place.cpus,
            environment={
                **os.environ,
                **place.environment,
                **environment(number, common.key, common.weights),
            },
            descriptors=[common.weights],
            start_seconds=common.start_seconds,
        )
        self._number, self._place = number, place
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path),
            base_url="http://localhost",
            headers={"Authorization": f"Bearer {common.key}"},
            timeout=_PATIENCE,
        )

    async def report(self) -> dict[str, Any]:
        """Returns the replica's part of the status. `running` is null while it does not answer."""
        running = None
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            answer = await within(_REPORT_SECONDS, self._client.get("/metrics"))
            found = _RUNNING.search(answer.text)
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
        claim: its hold on the data directory.
        haproxy: the program.
        bound: the bound sockets of its address.
        replicas: its replicas.
        common: what they have in common.
        config: the configuration of each replica.
        page: pattern of the paths of the chat page; "" without it.
    """

    def __init__(
        self,
        claim: Claim,
        haproxy: str,
        bound: Sequence[socket.socket],
        replicas: Sequence[Replica],
        common: Common,
        config: ServerConfig,
        page: str,
    ) -> None:
        self._claim, self._bound, self._replicas, self._common = claim, bound, replicas, common
        self._drain_seconds = config.drain_seconds
        # Commands for HAProxy go to a socket that it inherits. The path to its open file works also
        # where the file's name was removed.
        self._commands = unix_socket(Path(admin_of(claim.folder)))
        self._commands.listen(BACKLOG)
        self._admin = f"/proc/self/fd/{os.open(admin_of(claim.folder), os.O_PATH)}"
        listening = [one.fileno() for one in bound]
        address = ",".join(f"fd@{number}" for number in listening)
        port = bound[0].getsockname()[1]
        commands = f"fd@{self._commands.fileno()}"
        text = configuration(
            claim.folder, len(replicas), address, port, config, page, admin=commands
        )
        file = claim.folder / "haproxy.cfg"

        def prepare() -> None:
            claim.restore()
            file.write_text(text)

        # SIGUSR1: it takes no more connections, and ends with its last one.
        self._proxy = Process(
            "the proxy",
            [haproxy, "-db", "-q", "-C", "/", "-f", str(file)],  # the current folder may be gone
            functools.partial(check, self._admin),
            last_signal=signal.SIGUSR1,
            descriptors=[*listening, self._commands.fileno()],
            prepare=prepare,
        )
        self._stopping = asyncio.Event()
        self._restarting = asyncio.Lock()

    async def run(self, about: dict[str, Any], opened: Callable[[], object]) -> None:
        """Serves until a signal or a request to stop.

        Args:
            about: the status without that of the replicas.
            opened: called once requests are accepted.

        Raises:
            InternalError: each replica, or the proxy, ended before one was ready.
        """
        for number in ending_signals():
            stop = self._stopping.set if number == signal.SIGHUP else self._stop
            asyncio.get_running_loop().add_signal_handler(number, stop)
        control = asyncio.ensure_future(self._listen(about))
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._stopping.wait(),
                self._open(opened),
                self._restore(),
                *(replica.process.supervise() for replica in self._replicas),
            )
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._end()
        control.cancel()
        for task in done:
            task.result()

    async def _listen(self, about: dict[str, Any]) -> None:
        """Answers requests to the launcher, until it is cancelled."""
        servers = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ValueError, OSError):  # a client that leaves before the end
                verb, *words = (await reader.readline()).decode().split()
                if verb == "stop":
                    self._stop()
                    if words:
                        self._stop()
                    return  # the connection stays open until the launcher ends
                if verb == "restart":
                    await self._restart(list(map(int, words)), writer)
                else:
                    parts = await asyncio.gather(*(one.report() for one in self._replicas))
                    writer.write(json.dumps(about | {"replicas": parts}).encode())
            writer.close()

        async def listen(bound: socket.socket) -> None:
            servers.append(await asyncio.start_unix_server(answer, sock=bound))

        try:
            await keep_listening(self._claim.folder / CONTROL, listen)
        finally:
            for server in servers:
                server.close()

    async def _restore(self) -> NoReturn:
        """Makes files again that cleaners of temporary files remove."""
        last = ""
        while True:
            try:
                self._claim.restore()
                last = ""
            except (Error, OSError) as error:
                if str(error) != last:
                    log.warning(
                        "files of the deployment are gone and cannot be made again: %s", error
                    )
                last = str(error)
            await asyncio.sleep(_LOOK_SECONDS)

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
                os.ftruncate(self._common.weights, 0)  # the new processes may have others
                if count == 1:
                    tell(step="there is one replica: requests get 503 until it is ready again")
                for number in numbers or range(1, count + 1):
                    await self._restart_one(number, tell)
            tell(error=None)
        except (Error, OSError) as error:
            tell(error=str(error))

    async def _restart_one(self, number: int, tell: Callable[..., None]) -> None:
        tell(step=f"replica {number}: draining for at most {self._drain_seconds:g} s")
        await drain(self._admin, number)
        try:
            process = self._replicas[number - 1].process
            await process.restart(self._drain_seconds + LAST_SECONDS)
        finally:
            await resume(self._admin, number)
        try:
            await within(_UP_SECONDS, wait_until_up(self._admin, number))
        except TimeoutError as error:
            raise InternalError(f"the proxy has not found the new {process.name}") from error
        tell(step=f"replica {number}: ready, process {process.pid}")

    async def _open(self, opened: Callable[[], object]) -> None:
        """Runs the proxy once a replica is ready."""
        processes = [replica.process for replica in self._replicas]
        while not any(process.was_ready.is_set() for process in processes):
            if all(process.failure for process in processes):
                raise InternalError(processes[0].failure)
            await asyncio.sleep(CHECK_SECONDS)

        proxy = asyncio.ensure_future(self._proxy.supervise())
        try:
            while not self._proxy.was_ready.is_set():
                if self._proxy.restarts >= _PROXY_TRIES:
                    raise InternalError(self._proxy.failure)
                await asyncio.sleep(CHECK_SECONDS)
            opened()
            await proxy
        finally:
            proxy.cancel()

    async def _end(self) -> None:
        """Closes the address, and then ends the replicas as `lmchat serve` does."""
        for one in self._bound:
            one.close()
        self._commands.close()
        self._proxy.end(signal.SIGUSR1)
        processes = [replica.process for replica in self._replicas]
        for process in processes:
            process.end(signal.SIGTERM)
        seconds = [process.patience(self._drain_seconds + LAST_SECONDS) for process in processes]
        for process in processes:
            process.state = "draining"
        await asyncio.gather(*map(Process.ended, processes, seconds))
        await self._proxy.ended(_PATIENCE)

    def _stop(self) -> None:
        """Ends the deployment; at the second call at once. Shown tokens are in the journal."""
        if self._stopping.is_set():
            for replica in self._replicas:
                replica.process.end(signal.SIGKILL)
        self._stopping.set()
