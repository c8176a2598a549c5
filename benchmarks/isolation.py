#!/usr/bin/env python3
"""Measures one owner's stream, and the server's memory, beside heavy requests of another owner.

    python benchmarks/isolation.py [MODEL] [--seconds 30] [--record FILE]

The server runs as `lmchat serve`. One owner streams replies all the time. Another owner, in a
process of its own, sends one kind of request for half a minute, each after the answer to the one
before: a chat of 8 MiB, 4 MB to /tokenize, 4 MB of JSON inside of JSON, and 250 scores at once.
Measured are the gaps between two parts of a stream and the growth of the server's memory, whose KV
cache is full before. The engine leaves a CPU to the clients. It takes about 3 minutes, and fails
where a limit is not met. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import turbomind

KEYS = {"ann": "a" * 24, "bob": "b" * 24}
CACHE = 64 << 20  # bytes of KV
SCORES, SCORED = 250, 1000  # scores at once, and tokens of each
MOST_GAP, MOST_MEMORY = 0.25, 300 << 20  # seconds, bytes
MODEL = "memo"


def post(port: int, path: str, body: bytes) -> int:
    """Sends a request of the other owner and returns its status."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": f"Bearer {KEYS['bob']}", "Content-Type": "application/json"}
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def scores(port: int, count: int) -> Iterator[int]:
    """Sends some scores at once and yields their statuses."""

    def score(number: int) -> int:
        dice = random.Random(number)
        prompt = [dice.randrange(10, 1000) for _ in range(SCORED)]
        return post(port, "/v1/engine/score", json.dumps({"prompt": prompt}).encode())

    with ThreadPoolExecutor(count) as threads:
        yield from threads.map(score, range(count))


def bodies() -> dict[str, tuple[str, bytes]]:
    """Returns the path and the body of each load that is one request."""
    long = "All happy families are alike; each unhappy family is unhappy in its own way. "
    chat = {"messages": [{"role": "user", "content": long * ((8 << 20) // len(long) - 2)}]}
    nested = json.dumps({"max_tokens": [[1]] * 800_000})
    inner = {"text_input": "Hello", "sampling_parameters": nested}
    return {
        "chat of 8 MiB": ("/v1/chat/completions", json.dumps(chat).encode()),
        "4 MB to /tokenize": (
            "/tokenize", json.dumps({"prompt": long * (4_000_000 // len(long))}).encode(),
        ),
        "4 MB of nested JSON": (f"/v2/models/{MODEL}/generate", json.dumps(inner).encode()),
    }  # fmt: skip


def load(port: int, name: str, seconds: float, results: Any) -> None:
    """Sends requests of one kind for some time, and puts how many got which status."""
    found: Counter[int] = Counter()
    request = bodies().get(name)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if request is None:
            found.update(scores(port, SCORES))
        else:
            found[post(port, *request)] += 1
    results.put(dict(found))


class Watch:
    """Streams replies of one owner, and watches the server's memory.

    `gaps` are seconds between two parts of a stream, `most` is the largest size of the process.
    """

    def __init__(self, port: int, process: int) -> None:
        self._port, self._process = port, process
        self.gaps: list[float] = []
        self.most = 0

    def size(self) -> int:
        """Returns the resident bytes of the server."""
        pages = Path(f"/proc/{self._process}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Streams and watches until it is over."""
        watching = asyncio.ensure_future(self._watch())
        try:
            while not is_over():
                await self._stream(is_over)
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, self.size())
            await asyncio.sleep(0.02)

    async def _stream(self, is_over: Callable[[], bool]) -> None:
        messages = [{"role": "user", "content": "Tell me a long story."}]
        body = {"messages": messages, "max_tokens": 1800, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {KEYS['ann']}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        last = None
        while (line := await reader.readline()).strip() != b"data: [DONE]" and not is_over():
            if not line:
                raise SystemExit("the server closed the stream")
            if b'"content":"' in line and b'"role"' not in line:
                now = time.perf_counter()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
        writer.close()


@contextlib.contextmanager
def serving(model: str) -> Iterator[tuple[int, int]]:
    """Yields the port and the process of a server."""
    keys = [part for name, key in KEYS.items() for part in ("--api-key", f"{name}:{key}")]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmchat.cli", "serve", model, "--port", "0", *keys,
             "--model-name", MODEL, "--cache-memory", str(CACHE), "--log-level", "error",
             "--threads", str(max(1, (os.cpu_count() or 1) - 1))],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "LMCHAT_HOME": home},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            found = re.search(r":(\d+)$", process.stdout.readline())
            if found is None:
                raise SystemExit("the server has not started")
            yield int(found[1]), process.pid
        finally:
            process.terminate()
            process.wait()


def measured(port: int, process: int, name: str, seconds: float) -> dict[str, Any]:
    """Returns the figures beside one load; an empty name is none."""
    watch = Watch(port, process)
    results: multiprocessing.Queue[dict[int, int]] = multiprocessing.Queue()
    before, end = watch.size(), time.monotonic() + seconds
    other = multiprocessing.Process(target=load, args=(port, name, seconds, results))
    if name:
        other.start()
    asyncio.run(watch.run(lambda: not other.is_alive() if name else time.monotonic() > end))
    statuses = results.get() if name else {}
    gaps = sorted(watch.gaps)
    return {
        "load": name or "none",
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "parts": len(gaps),
        "longest_gap_ms": round(gaps[-1] * 1000, 1),
        "p99_gap_ms": round(gaps[len(gaps) * 99 // 100] * 1000, 1),
        "memory_mib": round((watch.most - before) / (1 << 20), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--record", type=Path, help="file to write the figures to, as JSON")
    given = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    rows = []
    with serving(given.model) as (port, process):
        list(scores(port, 40))  # fills the KV cache
        for name in ("", *bodies(), f"{SCORES} scores"):
            rows.append(measured(port, process, name, given.seconds))
            print(json.dumps(rows[-1]), flush=True)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    record = {
        "model": given.model,
        "cpu": cpu[1] if cpu else "",
        "isa": turbomind.available_isas()[-1],
        "cpus": os.cpu_count(),
        "limits": {"longest_gap_ms": MOST_GAP * 1000, "memory_mib": MOST_MEMORY >> 20},
        "rows": rows,
    }
    if given.record:
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    slow = max(row["longest_gap_ms"] for row in rows) > MOST_GAP * 1000
    if slow or max(row["memory_mib"] for row in rows) > MOST_MEMORY >> 20:
        raise SystemExit("a limit is not met")


if __name__ == "__main__":
    main()
