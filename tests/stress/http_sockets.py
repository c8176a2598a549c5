"""Opens hostile connections to a server while another client chats.

    python -m tests.stress.http_sockets --count 1000 --seed 1

The server is a process of its own with short limits. Clients send heads and bodies byte by byte, do
not read, close half or all of a connection, reset it, and send garbage after requests and in
chunks. The server must drop each of them. Meanwhile another owner streams the same greedy reply
again and again: each must be complete and equal. The event loop's lag, from `/metrics`, must be
below 50 ms for 99 % of its measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT), str(SUPPORT), str(SUPPORT / "serving")]
import httpx  # noqa: E402
from http_raw import request  # noqa: E402

KEYS = ("good:key-of-good", "bad:key-of-bad")
LIMITS = {"receive_seconds": 3, "send_seconds": 3, "idle_seconds": 3, "connections": 4000}
MOST_LAG = 0.05
PATIENCE = 60.0
"""Seconds within which the server must drop a hostile client."""

BODY = {"text_input": "Once", "max_tokens": 400, "ignore_eos": True}
GREEDY = {"text_input": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
HEADERS = [
    ("Host", "localhost"), ("Authorization", "Bearer key-of-bad"),
    ("Content-Type", "application/json"),
]  # fmt: skip
STREAM = "/v2/models/memo/generate_stream"


class Client:
    """One hostile connection. `gone()` waits until the server has dropped it."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.rng = rng
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._port = port
        self._loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        await self._loop.sock_connect(self.socket, ("127.0.0.1", self._port))

    async def send(self, data: bytes) -> bool:
        """Sends data; returns False once the server has dropped the connection."""
        try:
            await asyncio.wait_for(self._loop.sock_sendall(self.socket, data), PATIENCE)
        except (OSError, TimeoutError):
            return False
        return True

    async def drip(self, data: bytes) -> None:
        """Sends a byte at a time until the server drops the connection."""
        for at in range(len(data)):
            if not await self.send(data[at : at + 1]):
                return
            await asyncio.sleep(0.3)

    async def gone(self) -> None:
        """Reads until the server has dropped the connection."""
        with contextlib.suppress(OSError):
            while await asyncio.wait_for(self._loop.sock_recv(self.socket, 1 << 16), PATIENCE):
                pass


async def slow_head(client: Client) -> None:
    await client.drip(request("POST", STREAM, HEADERS, b"{}"))
    await client.gone()


async def slow_body(client: Client) -> None:
    await client.send(request("POST", STREAM, [*HEADERS, ("Content-Length", "5000")]))
    await client.drip(b" " * 5000)
    await client.gone()


async def slow_chunks(client: Client) -> None:
    await client.send(request("POST", STREAM, [*HEADERS, ("Transfer-Encoding", "chunked")]))
    for _ in range(1000):
        if not await client.send(b"1\r\n \r\n"):
            break
        await asyncio.sleep(0.3)
    await client.gone()


async def does_not_read(client: Client) -> None:
    await client.send(request("POST", STREAM, HEADERS, json.dumps(BODY).encode()))
    await asyncio.sleep(client.rng.uniform(4, 8))
    await client.gone()


async def floods(client: Client) -> None:
    """Sends requests and reads no responses."""
    for _ in range(2000):
        if not await client.send(request("GET", "/metrics", HEADERS) * 10):
            return


async def half_closes(client: Client) -> None:
    await client.send(request("POST", STREAM, HEADERS, json.dumps(BODY).encode()))
    await asyncio.sleep(client.rng.random())
    with contextlib.suppress(OSError):
        client.socket.shutdown(socket.SHUT_WR)
    await client.gone()


async def resets(client: Client) -> None:
    await client.send(request("POST", STREAM, HEADERS, json.dumps(BODY).encode()))
    await asyncio.sleep(client.rng.random())
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def pipelines_garbage(client: Client) -> None:
    await client.send(request("POST", STREAM, HEADERS, json.dumps(BODY).encode()))
    await client.send(client.rng.randbytes(client.rng.choice((10, 1000, 50_000))))
    await client.gone()


async def huge_chunk(client: Client) -> None:
    head = request("POST", STREAM, [*HEADERS, ("Transfer-Encoding", "chunked")])
    await client.send(head + client.rng.choice((b"7fffffffffffffff", b"fffffffff", b"a" * 400)))
    await client.send(b"\r\n")
    for _ in range(200):  # 13 MB, more than a body may have
        if not await client.send(b" " * 65536):
            break
    await client.gone()


async def garbage(client: Client) -> None:
    await client.send(client.rng.randbytes(client.rng.choice((1, 100, 100_000))))
    await client.gone()


async def idle(client: Client) -> None:
    await client.gone()


KINDS: tuple[Callable[[Client], Awaitable[None]], ...] = (
    slow_head, slow_body, slow_chunks, does_not_read, floods, half_closes, resets,
    pipelines_garbage, huge_chunk, garbage, idle,
)  # fmt: skip


class Run:
    """One run against one server."""

    def __init__(self, port: int, seed: int, only: str | None) -> None:
        self._kinds = [one for one in KINDS if only in (None, one.__name__)]
        self.port, self.seed = port, seed
        self.failures: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.streams = 0
        self._ended = asyncio.Event()

    async def hostile(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        kind = self._kinds[number % len(self._kinds)]
        await asyncio.sleep(rng.uniform(0, 5))
        client = Client(self.port, rng)
        try:
            await client.connect()
            await asyncio.wait_for(kind(client), 2 * PATIENCE)
        except (asyncio.TimeoutError, TimeoutError):
            self.failures.append(f"{kind.__name__} {number} was not dropped")
        except OSError as error:
            self.failures.append(f"{kind.__name__} {number}: {error}")
        finally:
            client.socket.close()
            self.kinds[kind.__name__] += 1

    async def normal(self, client: httpx.AsyncClient) -> None:
        """Streams the same reply until the hostile clients are gone."""
        expected: str | None = None
        while not self._ended.is_set():
            try:
                found = await streamed(client)
            except (httpx.HTTPError, ValueError) as error:
                self.failures.append(f"stream {self.streams}: {error!r}")
                continue
            self.streams += 1
            expected = expected or found
            if found != expected:
                self.failures.append(f"stream {self.streams}: {found!r}, expected {expected!r}")

    async def all(self, count: int) -> str:
        """Runs all clients and returns the metrics at the end."""
        headers = {"Authorization": "Bearer key-of-good"}
        url = f"http://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE) as client:
            normal = asyncio.ensure_future(self.normal(client))
            await asyncio.gather(*(self.hostile(number) for number in range(count)))
            self._ended.set()
            await normal
            deadline = time.monotonic() + PATIENCE
            while True:
                text = (await client.get("/metrics")).text
                if re.search(r"num_requests_running\{[^}]*\} 0\.0", text):
                    return text
                if time.monotonic() > deadline:
                    self.failures.append("requests of clients that are gone still run")
                    return text
                await asyncio.sleep(0.1)


async def streamed(client: httpx.AsyncClient) -> str:
    """Returns the text of one streamed reply."""
    async with client.stream("POST", STREAM, json=GREEDY) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    return "".join(json.loads(line[6:])["text_output"] for line in lines)


def lag_of(metrics: str) -> tuple[int, float, float]:
    """Returns the number of measurements of the loop's lag, the share below the limit, and an
    upper bound of P99 in seconds."""
    found = re.findall(r'event_loop_lag_seconds_bucket\{le="([^"]+)".*\} (\S+)', metrics)
    buckets = [(float(bound), float(number)) for bound, number in found]
    total = buckets[-1][1]
    below = next(number for bound, number in buckets if bound >= MOST_LAG)
    p99 = next(bound for bound, number in buckets if number >= 0.99 * total)
    return int(total), below / total, p99


def run(count: int, seed: int, only: str | None = None) -> dict[str, Any]:
    """Runs the clients and returns the record; `failures` in it is empty if all is well."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code = "import conftest; from lmchat.cli.main import main; main()"
        options = [f"--limit={name}={value}" for name, value in LIMITS.items()]
        options += [f"--api-key={key}" for key in KEYS]
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", "--log-level", "error", *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "LMCHAT_HOME": folder},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)$", process.stdout.readline().strip())
            if found is None:
                raise SystemExit(process.communicate()[1])
            begun = time.monotonic()
            clients, metrics = asyncio.run(_run(int(found[1]), seed, only, count))
            seconds = time.monotonic() - begun
            process.send_signal(signal.SIGTERM)
            log = process.communicate(timeout=PATIENCE)[1]
        finally:
            process.kill()
    failures = clients.failures + [f"logged: {line}" for line in log.splitlines()[:20]]
    if process.returncode != 0:
        failures.append(f"the server's exit code is {process.returncode}, expected 0")
    number, share, p99 = lag_of(metrics)
    return {
        "connections": count, "seed": seed, "kinds": dict(sorted(clients.kinds.items())),
        "streams": clients.streams, "lag_measurements": number,
        "lag_share_below_50_ms": round(share, 4), "lag_p99_below_seconds": p99,
        "failures": failures, "seconds": round(seconds, 1),
    }  # fmt: skip


async def _run(port: int, seed: int, only: str | None, count: int) -> tuple[Run, str]:
    clients = Run(port, seed, only)
    return clients, await clients.all(count)


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="hostile connections")
    parser.add_argument("--seed", type=int, default=1, help="seed of the clients")
    names = [one.__name__ for one in KINDS]
    parser.add_argument("--only", choices=names, help="clients of this kind only")
    parser.add_argument("--record", type=Path, help="file to write the results to, as JSON")
    given = parser.parse_args()
    record = run(given.count, given.seed, given.only)
    text = json.dumps(record, indent=1)
    if given.record:
        given.record.write_text(text + "\n")
    print(text)
    return 1 if record["failures"] or record["lag_share_below_50_ms"] < 0.99 else 0


if __name__ == "__main__":
    sys.exit(main())
