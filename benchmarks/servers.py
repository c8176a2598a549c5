"""HTTP servers of the runtimes, each started with the same model, slots and context."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peer_process import PR_SET_PDEATHSIG, PeerError, vllm_environment

SLOTS = 16
MAX_CONTEXT = 8192  # tokens of a conversation
START_SECONDS = 900.0
STOP_SECONDS = 40.0


@dataclass(frozen=True)
class Server:
    """How a server is started.

    Attributes:
        name: Short name, as options have it.
        label: Name in tables.
        command: The command line, without address.
        environment: Variables in addition to those of this process.
        sessions: Whether it keeps sessions.
    """

    name: str
    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    sessions: bool = False


def ours(folder: Path, home: Path, max_wait: float) -> Server:
    command = (sys.executable, "-m", "lmchat.cli", "serve", str(folder))
    options = (
        "--max-batch-size", str(SLOTS), "--max-context-tokens", str(MAX_CONTEXT),
        "--max-wait", f"{max_wait:g}",
    )  # fmt: skip
    return Server("lmchat", "lmchat", (*command, *options), {"LMCHAT_HOME": str(home)}, True)


def llama_server(binary: Path, gguf: Path, threads: int) -> Server:
    command = (
        str(binary), "-m", str(gguf), "-t", str(threads), "-tb", str(threads), "-np", str(SLOTS),
        "-c", str(SLOTS * MAX_CONTEXT), "-fa", "on", "--jinja", "--no-ui",
    )  # fmt: skip
    return Server("llama-server", f"llama-server -np {SLOTS}", command)


def vllm(binary: Path, folder: Path, root: Path, cpus: list[int]) -> Server:
    command = (
        str(binary), "serve", str(folder), "--dtype", "bfloat16", "--max-num-seqs", str(SLOTS),
        "--max-model-len", str(MAX_CONTEXT), "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
    )  # fmt: skip
    environment = vllm_environment(root, cpus) | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # as its users run it
    return Server("vllm", "vLLM CPU", command, environment)


class Running:
    """A server process on a free port of the loopback interface; `with` starts and ends it.

    Args:
        server: What to start.
        log: File for its output.
    """

    def __init__(self, server: Server, log: Path) -> None:
        self.server = server
        self.log = log

    def __enter__(self) -> Running:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        libc = ctypes.CDLL(None)
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.server.command, *address],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **self.server.environment},
                start_new_session=True,
                # The server must not outlive this process.
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                raise PeerError(
                    f"the server did not start, exit status {self.process.poll()}: see {self.log}"
                )
            time.sleep(0.5)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def __exit__(self, *_: object) -> None:
        """Ends the server and its workers, which are in its process group."""
        self.process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
