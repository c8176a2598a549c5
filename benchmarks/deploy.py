#!/usr/bin/env python3
"""Measures a deployment of replicas: what kills, updates and overload cost, and what HAProxy adds.

    python benchmarks/deploy.py [--parts kills,updates] [--quick] [--record FILE]

Prints a table of limits and figures, and fails where a limit is not held. memo answers, but for
updates and overload a model with random weights whose replies take seconds. Replicas, HAProxy and
clients share the CPUs. It takes at most 10 minutes (`--quick`: 2 minutes of small numbers, which
prove nothing). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from report import commit

import turbomind

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/support/serving")]
from deployment import (  # noqa: E402
    LONG,
    MOST,
    QUESTION,
    Deployment,
    all_ready,
    created,
    deployed,
    streaming,
    tokens,
)
from web_page import SLOW, slow_model  # noqa: E402

from lmchat import bundled  # noqa: E402
from lmchat.deploy import proxy  # noqa: E402

CHAT = "/v1/chat/completions"
PROBE_SECONDS = 0.05
REPLY = 16  # tokens of a reply under overload


class Table:
    """Limits, figures, and whether the limits were held, printed row by row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        print("| point | what | figure | limit | held |\n|---|---|---|---|---|", flush=True)

    def most(self, point: int, what: str, figure: float, limit: float) -> None:
        """Adds a figure that may not exceed a limit."""
        self._add(point, what, figure, f"<= {limit:g}", figure <= limit)

    def equal(self, point: int, what: str, figure: float, expected: float) -> None:
        """Adds a number that must have one value."""
        self._add(point, what, figure, f"{expected:g}", figure == expected)

    def note(self, point: int, what: str, figure: float) -> None:
        """Adds a figure without a limit."""
        self._add(point, what, figure, "", True)

    def _add(self, point: int, what: str, figure: float, limit: str, held: bool) -> None:
        row = {"point": point, "what": what, "figure": round(figure, 3), "limit": limit}
        self.rows.append({**row, "held": held})
        word = ("yes" if held else "**no**") if limit else ""
        print(f"| {point} | {what} | {row['figure']:g} | {limit} | {word} |", flush=True)


@contextlib.contextmanager
def running(replicas: int, *options: str, **more: Any) -> Iterator[tuple[Deployment, httpx.Client]]:
    """Yields a deployment and a client of its address."""
    with (
        tempfile.TemporaryDirectory() as home,
        deployed(home, "--replicas", str(replicas), "--log-level", "error", *options, **more) as it,
        it.client() as client,
    ):
        yield it, client


def until(seconds: float, ask: Callable[[], httpx.Response]) -> float:
    """Repeats a request until it is answered with 200, and returns the seconds that it took."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        with contextlib.suppress(httpx.HTTPError):
            if ask().status_code == 200:
                break
        time.sleep(0.01)
    return time.perf_counter() - begin


# --- 1: kills -------------------------------------------------------------------------------------


def kills(table: Table, quick: bool) -> None:
    """Kills replicas in mid-reply, and stops one."""
    count, found = 2 if quick else 10, Counter[str]()
    answers, continues = [], []
    with running(2) as (deployment, client):
        path = deployment.session_at(client, 1)
        client.post(f"{path}/turns", json=QUESTION).raise_for_status()
        expected = tokens(client, path)
        for n in range(count):
            number = n % 2 + 1
            pid = deployment.wait(all_ready)["replicas"][number - 1]["pid"]
            killed, other = (deployment.session_at(client, one) for one in (number, 3 - number))
            with streaming(client, f"{killed}/turns") as parts, ThreadPoolExecutor() as pool:
                beside = pool.submit(whole, client, other)
                shown = next(parts)
                while len(shown) < MOST // 4:
                    shown += next(parts)
                os.kill(pid, signal.SIGKILL)
                answers.append(until(10, lambda path=killed: client.get(path)))
                begin = time.perf_counter()
                try:
                    for part in parts:
                        shown += part
                except httpx.RemoteProtocolError as error:
                    found["incomplete"] += "incomplete" in str(error)
                key = {"Idempotency-Key": f"continue {n}"}
                with streaming(client, f"{killed}/continue", {}, key) as more:
                    next(more)
                    continues.append(answers[-1] + time.perf_counter() - begin)
                    for _ in more:
                        pass
                found["beside"] += beside.result() == expected
            found["shown"] += expected[: len(shown)] == shown and len(shown) < MOST
            found["continued"] += tokens(client, killed) == expected
        deployment.wait(all_ready)
        path = deployment.session_at(client, 1)
        pid = deployment.status()["replicas"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        begin = time.perf_counter()
        body = {"text": "Hello.", "settings": {"max_new_tokens": 1}}
        until(60, lambda: client.post(f"{path}/turns", json=body, timeout=2))
        stopped = time.perf_counter() - begin
    table.equal(1, f"streams of {count} kills that ended as an incomplete body",
                found["incomplete"], count)  # fmt: skip
    table.equal(1, "kills after which all shown tokens are there", found["shown"], count)
    table.equal(1, "`continue` gave the tokens of an unbroken run", found["continued"], count)
    table.equal(1, "streams of the other replica that went on to their end", found["beside"], count)
    table.most(1, "s from a kill until another replica shows the session, most", max(answers), 1)
    table.most(1, "s from a kill to the first token of `continue`, most", max(continues), 1)
    table.most(1, "s from SIGSTOP until the session's next turn is answered", stopped, 20)


def whole(client: httpx.Client, path: str) -> list[int]:
    """Returns the tokens of a streamed reply."""
    with streaming(client, f"{path}/turns") as parts:
        return [token for part in parts for token in part]


# --- 2: updates -----------------------------------------------------------------------------------


class Streams:
    """Sessions whose replies are streamed one after the other, each by a thread.

    Args:
        deployment: what serves them.
        count: how many there are.
        length: tokens of a reply.
        once: whether each has one reply.
    """

    def __init__(self, deployment: Deployment, count: int, length: int, once: bool = False) -> None:
        self._deployment, self._tokens = deployment, length
        self._is_over = threading.Event()
        if once:
            self._is_over.set()
        self.seconds: list[float] = []
        self.broken: list[str] = []
        self.lost = 0
        self._pool = ThreadPoolExecutor(count)
        self._work = [self._pool.submit(self._run) for _ in range(count)]

    def end(self) -> None:
        """Returns after the last reply."""
        self._is_over.set()
        for work in self._work:
            work.result()
        self._pool.shutdown()

    def _run(self) -> None:
        settings = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": self._tokens}
        with self._deployment.client() as client:
            path, done = created(client, **settings), 0
            while True:
                begin = time.perf_counter()
                try:
                    count = sum(map(len, self._parts(client, path)))
                    if count != self._tokens:
                        self.broken.append(f"{count} tokens")
                except (httpx.HTTPError, AssertionError) as error:
                    self.broken.append(repr(error))
                done += 1
                self.seconds.append(time.perf_counter() - begin)
                if self._is_over.is_set():
                    break
                if self._tokens * (done + 1) > MOST:  # the context is full
                    self.lost += len(client.get(path).json().get("turns", ())) != 2 * done
                    path, done = created(client, **settings), 0
            self.lost += len(client.get(path).json().get("turns", ())) != 2 * done

    def _parts(self, client: httpx.Client, path: str) -> Iterator[list[int]]:
        with streaming(client, f"{path}/turns") as parts:
            yield from parts


class Probe:
    """Requests every 50 ms, with and without a key."""

    def __init__(self, url: str, path: str) -> None:
        self.statuses: Counter[object] = Counter()
        self._url, self._path, self._is_over = url, path, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Ends it."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._is_over.is_set():
                for path in ("/v1/models", self._path):
                    try:
                        self.statuses[client.get(path).status_code] += 1
                    except httpx.HTTPError as error:
                        self.statuses[type(error).__name__] += 1
                self._is_over.wait(PROBE_SECONDS)


def updates(table: Table, quick: bool) -> None:
    """Replaces the replicas while replies are streamed."""
    rounds, streams, seconds = (1, 4, 2.0) if quick else (3, 16, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        model = slow_model(Path(folder) / "model")
        options = (*SLOW, "--cache-memory", "256MiB")
        with running(2, *options, model=model) as (deployment, client):
            trial = Streams(deployment, streams, 8, once=True)
            trial.end()
            length = max(2, round(8 * seconds / statistics.median(trial.seconds)))
            path = created(client, **LONG)
            load, probe = Streams(deployment, streams, length), Probe(deployment.url, path)
            for _ in range(rounds):
                deployment.restart()
            load.end()
            probe.end()
    errors = sum(n for status, n in probe.statuses.items() if status != 200)
    note = f"{rounds} updates of 2 replicas, {streams} open streams"
    table.note(2, f"s of a stream, median ({note})", statistics.median(load.seconds))
    table.equal(2, f"broken streams of {len(load.seconds)}", len(load.broken), 0)
    table.equal(2, "sessions that lost a turn", load.lost, 0)
    table.equal(2, f"answers other than 200 to {sum(probe.statuses.values())} probes", errors, 0)
    for broken in load.broken[:3]:
        print(broken, file=sys.stderr)


def drains(table: Table, quick: bool) -> None:
    """Drains one of three replicas."""
    count, moved = 12 if quick else 60, 0
    with running(3) as (deployment, client):
        keys = [{"x-session-id": f"session {n}"} for n in range(count)]
        before = [replica_of(deployment, client, key) for key in keys]
        asyncio.run(proxy.drain(proxy.admin_of(deployment.folder), 1))
        after = [replica_of(deployment, client, key) for key in keys]
    table.equal(2, "sessions of a draining replica that stayed there", after.count(1), 0)
    others = [(old, new) for old, new in zip(before, after, strict=True) if old != 1]
    moved = sum(old != new for old, new in others)
    table.equal(2, f"sessions of two other replicas that moved, of {len(others)}", moved, 0)


def replica_of(deployment: Deployment, client: httpx.Client, key: dict[str, str]) -> int:
    """Returns the replica that answers a turn of a session."""
    before = deployment.answered()
    client.post(CHAT, json=chat("Hello.", 1), headers=key).raise_for_status()
    changes = [new - old for old, new in zip(before, deployment.answered(), strict=True)]
    return changes.index(1) + 1


def chat(text: str, tokens: int) -> dict[str, Any]:
    """Returns the body of a chat completion."""
    messages = [{"role": "user", "content": text}]
    return {"model": "memo", "max_tokens": tokens, "temperature": 0, "messages": messages}


# --- 3: one session through two replicas ----------------------------------------------------------


def long_memo(folder: Path) -> Path:
    """Writes memo with a longer context, and returns the folder."""
    shutil.copytree(bundled.FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return folder


def pairs(table: Table, quick: bool) -> None:
    """Sends pairs of turns to one session, and stops replies, through both replicas."""
    count, stops = (10, 3) if quick else (200, 20)
    acknowledged, wrong, times = set(), 0, []
    with (
        tempfile.TemporaryDirectory() as folder,
        running(2, model=long_memo(Path(folder) / "memo")) as (deployment, client),
        deployment.direct(1) as one,
        deployment.direct(2) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        path = created(client, temperature=0.0, max_new_tokens=1)

        def ask(replica: httpx.Client, text: str) -> int:
            status = replica.post(f"{path}/turns", json={"text": text}).status_code
            if status == 200:
                acknowledged.add(text)
            return status

        for n in range(count):
            asked = [pool.submit(ask, to, f"{n} {name}") for to, name in ((one, "a"), (two, "b"))]
            statuses = sorted(work.result() for work in asked)
            wrong += statuses not in ([200, 200], [200, 409])
        turns = client.get(f"{path}?details=true").json()["turns"]
        texts = [turn["text"] for turn in turns if turn["role"] == "user"]
        for _ in range(stops):
            running_path = deployment.session_at(client, 1)
            with streaming(client, f"{running_path}/turns") as parts:
                next(parts)
                begin = time.perf_counter()
                stopped = two.post(f"{running_path}/stop").json()
                for _ in parts:
                    pass
                times.append(time.perf_counter() - begin)
                wrong += not stopped["stopped"]
    table.equal(3, f"pairs of {count} with other answers than 200 and 409 or 200", wrong, 0)
    table.equal(3, "acknowledged turns that are missing", len(acknowledged - set(texts)), 0)
    table.equal(3, "turns that are doubled", len(texts) - len(set(texts)), 0)
    table.equal(3, "turns that are there without a 200", len(set(texts) - acknowledged), 0)
    table.most(3, f"s to stop a reply through the other replica, most of {stops}", max(times), 0.5)


# --- 4: sessions stay -----------------------------------------------------------------------------


def stays(table: Table, quick: bool) -> None:
    """Chats in rounds, with the whole history."""
    count, rounds = (20, 2) if quick else (40, 4)
    used, homes, again, moved = [0] * count, [0] * count, 0, 0
    with running(2) as (deployment, client):
        histories: list[list[dict[str, str]]] = [[] for _ in range(count)]
        for turn in range(rounds):
            for n, history in enumerate(histories):
                before = deployment.answered()
                body = chat(f"This is turn {turn} of {n}.", 4)
                key = {"x-session-id": f"session {n}"}
                answer = client.post(CHAT, json=body, headers=key)
                usage = answer.raise_for_status().json()["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                again += max(0, used[n] - 1 - cached)  # the last token of a reply has no KV
                used[n] = usage["total_tokens"]
                after = deployment.answered()
                home = [b - a for a, b in zip(before, after, strict=True)].index(1)
                moved += bool(turn) and home != homes[n]
                homes[n] = home
                history.append(body["messages"][0])
    share = 100 * max(homes.count(0), homes.count(1)) / count
    table.equal(4, f"turns of {count} sessions, {rounds} rounds, at another replica", moved, 0)
    table.equal(4, "tokens that were prefilled again", again, 0)
    table.most(4, "% of the sessions at the fuller of 2 replicas", share, 70)


# --- 5: overload, and what HAProxy adds -----------------------------------------------------------


def overload(table: Table, quick: bool) -> None:
    """Sends more turns than the replicas can answer."""
    seconds = 5 if quick else 60
    with tempfile.TemporaryDirectory() as folder:
        model = slow_model(Path(folder) / "model")
        options = (*SLOW, "--cache-memory", "256MiB", "--max-wait", "1")
        with running(2, *options, model=model) as (deployment, _):
            trial = Streams(deployment, 16, REPLY, once=True)
            trial.end()
            rate = 2 * 16 / statistics.median(trial.seconds)
            found = load(deployment.url, rate, seconds)
    table.note(5, f"turns per s for {seconds} s, twice the capacity", rate)
    table.note(5, "turns that were refused with 429", found["refused"])
    table.equal(5, "turns that failed otherwise", found["failed"], 0)
    refusal = found["refusal"]["p99"] if found["refusal"] else float("nan")
    table.most(5, "ms to a 429, P99", 1000 * refusal, 100)


def load(url: str, rate: float, seconds: float) -> dict[str, Any]:
    """Returns the figures of `lmchat bench serve` at one rate."""
    done = subprocess.run(
        [sys.executable, "-m", "lmchat.cli", "bench", "serve", url, "--rates", f"{rate:.3f}",
         "--duration", str(seconds), "--warmup", "3", "--reply-tokens", str(REPLY),
         "--message-tokens", "16", "--null-seconds", "0", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)["rates"][0]
    return found


class UnixConnection(http.client.HTTPConnection):
    """A connection to a replica's socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        """Connects."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def overhead(table: Table, quick: bool) -> None:
    """Sends the same requests to a replica and through HAProxy, and reads a reply both ways."""
    requests, replies = (50, 2) if quick else (1000, 20)
    times: tuple[list[float], list[float]] = ([], [])
    late: list[float] = []
    with running(1) as (deployment, client):
        port = httpx.URL(deployment.url).port
        direct = UnixConnection(proxy.socket_of(deployment.folder, 1))
        ways = (direct, http.client.HTTPConnection("127.0.0.1", port))
        for _ in range(requests):
            for connection, seconds in zip(ways, times, strict=True):
                begin = time.perf_counter()
                connection.request("GET", "/version")
                connection.getresponse().read()
                seconds.append(time.perf_counter() - begin)
        for n in range(replies):
            path = created(client, **LONG)
            with streaming(client, f"{path}/turns") as parts:
                next(parts)
                late += asyncio.run(differences(deployment, port, path, n % 2 == 1))
    without, through = map(statistics.median, times)
    table.most(5, f"ms that HAProxy adds to a request, median of {requests}",
               1000 * (through - without), 1.5)  # fmt: skip
    table.most(5, f"ms that HAProxy adds to a chunk, median of {len(late)}",
               1000 * statistics.median(late), 0.7)  # fmt: skip


async def differences(deployment: Deployment, port: int, path: str, swap: bool) -> list[float]:
    """Returns how much later the events of a reply arrive through HAProxy than without it."""
    ways = [
        asyncio.open_unix_connection(proxy.socket_of(deployment.folder, 1)),
        asyncio.open_connection("127.0.0.1", port),
    ]
    order = [1, 0] if swap else [0, 1]
    found = [await ways[n] for n in order]
    for _, writer in found:
        head = f"GET {path}/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
    seen = await asyncio.gather(*(arrivals(reader) for reader, _ in found))
    for _, writer in found:
        writer.close()
    direct, through = (seen[order.index(n)] for n in (0, 1))
    both = sorted(direct.keys() & through.keys(), key=direct.__getitem__)
    return [through[event] - direct[event] for event in both[5:]]  # the first ones wait for both


async def arrivals(reader: asyncio.StreamReader) -> dict[bytes, float]:
    """Returns when each event arrived, by its id."""
    found = {}
    while line := await reader.readline():
        if line.startswith(b"id: "):
            found[line] = time.perf_counter()
    return found


PARTS: dict[str, Callable[[Table, bool], None]] = {
    "kills": kills,
    "updates": updates,
    "drains": drains,
    "pairs": pairs,
    "stays": stays,
    "overload": overload,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it")
    parser.add_argument("--record", type=Path, help="file to write the figures to, as JSON")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"--parts has {unknown[0]!r}, expected some of {', '.join(PARTS)}")
    table, begin = Table(), time.monotonic()
    for part in parts:
        PARTS[part](table, given.quick)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    record = {
        "cpu": cpu[1] if cpu else "",
        "isa": turbomind.available_isas()[-1],
        "cpus": os.cpu_count(),
        "commit": commit(),
        "quick": given.quick,
        "seconds": round(time.monotonic() - begin),
        "rows": table.rows,
    }
    print(f"\n{json.dumps({**record, 'rows': len(table.rows)})}")
    if given.record:
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    if not all(row["held"] for row in table.rows):
        raise SystemExit("a limit is not held")


if __name__ == "__main__":
    main()
