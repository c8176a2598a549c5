"""Breaks requests of openai-python, which repeats them, and counts how often each question is
stored.

    python -m tests.stress.retry_kill --count 200 --seed 1

One server or two replicas of one data directory answer behind a proxy that takes each connection to
the next of them. A run asks one question at one door, by a client that is as it is installed, and
repeats the call until it is answered, as its user would. Meanwhile one thing breaks: the client's
timeout of 0.2 to 2 s ends attempts, or a server is killed before the first token, in mid-reply, or
when the last byte of the response has reached the proxy and not the client. In the end each
question must be stored once, and its reply must be the text that the client got.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(ROOT), str(SUPPORT), str(SUPPORT / "serving")]
import openai  # noqa: E402
from command import ENVIRONMENT, LMCHAT  # noqa: E402

from lmchat.store.sqlite.sqlite_store import SqliteStore  # noqa: E402

DOORS = ("session", "header", "conversation", "previous", "response")
BREAKS = ("timeout", "first token", "middle", "last byte")
_ENDS = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete")
_ATTEMPTS = 60  # calls until a question counts as unanswered


class Replica:
    """One `lmchat serve`, which is started again when it was killed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.port: int | None = None
        self.start()

    def start(self) -> None:
        """Starts it and waits until it takes requests."""
        process = self.process = subprocess.Popen(
            [*LMCHAT, "serve", "--port", "0", "--threads", "1", "--max-batch-size", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**ENVIRONMENT, "LMCHAT_HOME": str(self._home), "TURBOMIND_ISA": "portable"},
        )
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline())
        if found is not None:  # else it was killed while it started, and another one starts
            self.port = int(found[1])

    def kill(self) -> None:
        """Kills it, and starts it again on another thread."""
        self.port = None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        threading.Thread(target=self.start, daemon=True).start()

    def stop(self) -> None:
        """Ends it in order."""
        while self.port is None:
            time.sleep(0.05)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Proxy:
    """Takes each connection to the next replica that runs.

    Args:
        replicas: the replicas.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._next = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.kills: Callable[[bytes], float | None] = lambda _data: None
        """Returns the seconds until a replica is killed that has answered with this data; it is
        called with b"" when the request has been passed on."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._socket.accept()
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self._next += 1
            replica = self._replicas[self._next % len(self._replicas)]
            port = replica.port
            if port is not None:
                with contextlib.suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", port))
                    break
            time.sleep(0.02)
        else:
            client.close()
            return
        threading.Thread(target=self._requests, args=(client, server, replica), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                seconds = self.kills(data)
                if seconds is not None:
                    time.sleep(seconds)
                    replica.kill()
                    break
                client.sendall(data)
        _shut(client, server)

    def _requests(self, client: socket.socket, server: socket.socket, replica: Replica) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
                seconds = self.kills(b"")
                if seconds is not None:
                    time.sleep(seconds)
                    replica.kill()
        _shut(client, server)


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Run:
    """One question.

    Args:
        rng: chooses what happens.
        number: its number.
        proxy: the proxy.
    """

    def __init__(self, rng: random.Random, number: int, proxy: Proxy) -> None:
        self.door = rng.choice(DOORS)
        self.breaks = rng.choice(BREAKS)
        self.is_streamed = rng.random() < 0.5
        self.word = f"Wendle{number}bury"
        self.question = f"Say {self.word}."
        self._rng, self._proxy = rng, proxy
        self._length = rng.randrange(20, 1800)
        timeout = rng.uniform(0.2, 2.0) if self.breaks == "timeout" else 30.0
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", timeout=timeout
        )
        self._plain = self._client.with_options(timeout=30.0, max_retries=20)
        self._headers = {"Idempotency-Key": f"key {number}"} if rng.random() < 0.3 else {}
        self.calls = 0

    def __str__(self) -> str:
        how = "stream" if self.is_streamed else "whole"
        return f"{self.door}, {how}, {self.breaks}{', key' if self._headers else ''}"

    def ask(self) -> str | None:
        """Asks until there is an answer, and returns its text."""
        call = self._call()
        self._proxy.kills = self._kills()
        try:
            for self.calls in range(1, _ATTEMPTS + 1):
                try:
                    return call()
                except (openai.APIConnectionError, openai.APIStatusError, openai.APIError):
                    time.sleep(self._rng.uniform(0.0, 0.5))
                except Exception as error:  # a stream that broke in the middle
                    if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "httpx2"):
                        raise
            return None
        finally:
            self._proxy.kills = lambda _data: None

    def _kills(self) -> Callable[[bytes], float | None]:
        """Returns what decides when a replica is killed: once in a run."""
        delay = {"first token": self._rng.uniform(0, 0.02), "middle": self._rng.uniform(0.05, 0.6)}
        left, one = [self.breaks != "timeout"], threading.Lock()

        def kills(data: bytes) -> float | None:
            with one:
                if not left[0]:
                    return None
                if self.breaks == "last byte":
                    if not data or (self.is_streamed and not any(end in data for end in _ENDS)):
                        return None
                    left[0] = False
                    return 0.0
                if data:
                    return None
                left[0] = False
                return delay[self.breaks]

        return kills

    def _call(self) -> Callable[[], str]:
        more: dict[str, Any] = {"extra_headers": dict(self._headers), "model": "memo"}
        fields: dict[str, Any] = {"ignore_eos": True, "seed": 7}
        if self.door in ("session", "header"):
            if self.door == "session":
                fields["session"] = f"chat of {self.word}"
            else:
                more["extra_headers"]["x-session-id"] = f"chat-of-{self.word}"
            messages: Any = [{"role": "user", "content": self.question}]
            more |= {"messages": messages, "max_tokens": self._length, "temperature": 1.0}
            return lambda: self._chat({**more, "extra_body": fields})
        if self.door == "conversation":
            more["conversation"] = self._plain.conversations.create().id
        elif self.door == "previous":
            first = self._plain.responses.create(model="memo", input="Hello.", max_output_tokens=2)
            more["previous_response_id"] = first.id
        more |= {"input": self.question, "max_output_tokens": self._length, "temperature": 1.0}
        return lambda: self._response({**more, "extra_body": fields})

    def _chat(self, body: dict[str, Any]) -> str:
        if not self.is_streamed:
            return self._client.chat.completions.create(**body).choices[0].message.content
        with self._client.chat.completions.create(**body, stream=True) as stream:
            chunks = list(stream)
        if not any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks):
            raise openai.APIConnectionError(message="cut", request=stream.response.request)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def _response(self, body: dict[str, Any]) -> str:
        if not self.is_streamed:
            return self._client.responses.create(**body).output_text
        with self._client.responses.create(**body, stream=True) as stream:
            events = list(stream)
        if not events or events[-1].type not in ("response.completed", "response.incomplete"):
            raise openai.APIConnectionError(message="cut", request=stream.response.request)
        return events[-1].response.output_text


def faults_of(home: Path, runs: list[tuple[Run, str | None]]) -> list[str]:
    """Returns a sentence for each question that is not stored once with the reply that was got."""
    store = SqliteStore(home)
    records = store.records()
    store.close()
    faults = []
    for run, text in runs:
        found = []
        for record in records:
            if run.word in record.unanswered:
                found.append("(unanswered)")
            for turn in record.tree:
                if turn.role == "user" and run.word in turn.text:
                    replies = [reply.text for reply in record.tree.children(turn.id)]
                    found += [*replies[:1]] * turn.text.count(run.word) or ["(no reply)"]
        if found != [text]:
            what = [one[:40] if one else one for one in (text, *found)]
            faults.append(f"{run}: stored {len(found)} times, got and stored {what}")
    return faults


def main() -> int:
    """Runs all, and returns 1 if a question is not stored once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print each run")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for replicas in (1, 2):
        half = options.count // 2 if replicas == 2 else options.count - options.count // 2
        with tempfile.TemporaryDirectory(prefix="lmchat-retries-") as folder:
            home = Path(folder)
            servers = [Replica(home) for _ in range(replicas)]
            proxy = Proxy(servers)
            runs: list[tuple[Run, str | None]] = []
            for number in range(half):
                run = Run(random.Random(rng.random()), number, proxy)
                runs.append((run, run.ask()))
                counts[run.breaks] += 1
                counts["calls"] += run.calls
                if options.verbose:
                    print(f"{replicas} {number}: {run}, {run.calls} calls", flush=True)
            for server in servers:
                server.stop()
            faults += [f"{replicas} servers: {fault}" for fault in faults_of(home, runs)]
    print(f"{options.count} questions, seed {options.seed}: {dict(counts)}; {len(faults)} faults")
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    sys.exit(main())
