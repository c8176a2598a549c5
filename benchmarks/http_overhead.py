#!/usr/bin/env python3
"""Measures what HTTP adds to the same load in Python: time to the first token, and between tokens.

    python benchmarks/http_overhead.py MODEL [--streams 16] [--rounds 5] [--json]

One process runs the engine and the server. Each round sends the same conversations twice: by
`AsyncChatEngine.chat` on the server's own loop, and over HTTP from a client in another process. The
order alternates. The client reads sockets and parses nothing but line ends, so it costs little.
Use a model of the size that matters: with a tiny one, a step takes no longer than sending its
tokens. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn

from lmchat import AsyncChatEngine
from lmchat.generation.parts import Delta
from lmchat.server import ServerConfig, create_app
from lmchat.server.http.process import uvicorn_config

ALONE_TOKENS = 8  # of a request alone; the first ones may be parts of a character
WORDS = "river stone lamp paper green seven winter music bread table cloud horse".split()

Times = list[float]
"""Time of the request, then of each part of text, in seconds of one process's clock."""


def conversations(count: int, words: int, dice: random.Random) -> list[list[dict[str, str]]]:
    """Returns conversations of one question each, no two of which begin alike."""
    texts = [" ".join(dice.choices(WORDS, k=words)) for _ in range(count)]
    return [[{"role": "user", "content": f"{dice.getrandbits(40)} {text}"}] for text in texts]


def printable(engine: AsyncChatEngine) -> dict[int, float]:
    """Returns a logit bias with which every token is text, also of a model with random weights."""
    ids = engine.tokenizer.encode(" ".join(WORDS), add_special_tokens=False)
    return dict.fromkeys(ids, 100.0)


async def in_python(engine: AsyncChatEngine, messages: Any, tokens: int) -> Times:
    times = [time.perf_counter()]
    stream = await engine.chat(
        messages,
        stream=True,
        max_new_tokens=tokens,
        ignore_eos=True,
        temperature=0,
        logit_bias=printable(engine),
    )
    async for part in stream.events():
        if isinstance(part, Delta) and part.text:
            times.append(time.perf_counter())
    return times


async def over_http(port: int, messages: Any, tokens: int, bias: dict[str, float]) -> Times:
    body = {
        "messages": messages,
        "logit_bias": bias,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = [time.perf_counter()]
    writer.write(head.encode() + content)
    while (line := await reader.readline()).strip() != b"data: [DONE]":
        if not line:
            raise SystemExit("the server closed the connection")
        if b'"content":"' in line and b'"role"' not in line:
            times.append(time.perf_counter())
    writer.close()
    return times


async def client(port: int) -> None:
    """Runs the loads that come on standard input, one JSON line each."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        load = json.loads(line)
        runs = (over_http(port, one, load["tokens"], load["bias"]) for one in load["conversations"])
        print(json.dumps(await asyncio.gather(*runs)), flush=True)


class Client:
    """The client's process."""

    def __init__(self, process: asyncio.subprocess.Process, bias: Mapping[int, float]) -> None:
        self._process = process
        self._bias = bias

    @classmethod
    async def start(cls, port: int, bias: Mapping[int, float]) -> Client:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__)), "-", "--client", str(port),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
            ),
            bias,
        )  # fmt: skip

    async def run(self, load: list[Any], tokens: int) -> list[Times]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"conversations": load, "tokens": tokens, "bias": self._bias}) + "\n"
        self._process.stdin.write(line.encode())
        found: list[Times] = json.loads(await self._process.stdout.readline())
        return found

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Samples:
    """Times of one way of sending."""

    def __init__(self) -> None:
        self.alone: list[float] = []
        self.first: list[float] = []
        self.between: list[float] = []

    def add(self, alone: list[Times], together: list[Times]) -> None:
        self.alone += [times[1] - times[0] for times in alone if len(times) > 1]
        self.first += [times[1] - times[0] for times in together if len(times) > 1]
        for times in together:
            self.between += [b - a for a, b in itertools.pairwise(times[1:])]

    def medians(self) -> dict[str, float]:
        return {
            "ttft_alone_ms": statistics.median(self.alone) * 1000,
            "ttft_ms": statistics.median(self.first) * 1000,
            "inter_token_ms": statistics.median(self.between) * 1000,
        }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(arguments.seed)
    async with AsyncChatEngine(
        arguments.model, store="memory", max_batch_size=arguments.streams
    ) as engine:
        config = ServerConfig()
        server = uvicorn.Server(
            uvicorn_config(create_app(engine, config), config, host="127.0.0.1", port=0)
        )
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        peer = await Client.start(port, printable(engine))
        samples = {"python": Samples(), "http": Samples()}
        for number in range(arguments.rounds + 1):
            for way in ("python", "http") if number % 2 else ("http", "python"):
                found = await one_round(engine, peer, way, arguments, dice)
                if number:  # the first round warms up
                    samples[way].add(*found)
        await peer.close()
        server.should_exit = True
        await serving
    found = {way: one.medians() for way, one in samples.items()}
    python, http = found["python"], found["http"]
    return {
        **found,
        "added_ttft_alone_ms": http["ttft_alone_ms"] - python["ttft_alone_ms"],
        "added_ttft_ms": http["ttft_ms"] - python["ttft_ms"],
        "added_inter_token": http["inter_token_ms"] / python["inter_token_ms"] - 1,
    }


async def one_round(
    engine: AsyncChatEngine,
    peer: Client,
    way: str,
    arguments: argparse.Namespace,
    dice: random.Random,
) -> tuple[list[Times], list[Times]]:
    """Returns the times of requests one after the other, and of all streams together."""
    alone: list[Times] = []
    for one in conversations(arguments.alone, arguments.words, dice):
        if way == "http":
            alone += await peer.run([one], ALONE_TOKENS)
        else:
            alone.append(await in_python(engine, one, ALONE_TOKENS))
    load = conversations(arguments.streams, arguments.words, dice)
    if way == "http":
        return alone, await peer.run(load, arguments.tokens)
    runs = (in_python(engine, one, arguments.tokens) for one in load)
    return alone, list(await asyncio.gather(*runs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder or a hub name")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each reply")
    parser.add_argument("--words", type=int, default=60, help="words of each question")
    parser.add_argument("--alone", type=int, default=8, help="requests alone, per round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        return asyncio.run(client(arguments.client))
    sys.setswitchinterval(0.001)  # as `lmchat serve` has it
    result = asyncio.run(measure(arguments))
    if arguments.json:
        return print(json.dumps(result, indent=2))
    for way in ("python", "http"):
        one = result[way]
        print(f"{way:7} TTFT alone {one['ttft_alone_ms']:.2f} ms,", end=" ")
        print(f"of {arguments.streams} streams {one['ttft_ms']:.2f} ms,", end=" ")
        print(f"between tokens {one['inter_token_ms']:.3f} ms")
    print(f"HTTP adds {result['added_ttft_alone_ms']:.2f} ms to the TTFT of one request,", end=" ")
    print(f"{result['added_ttft_ms']:.2f} ms to that of {arguments.streams}, and", end=" ")
    print(f"{result['added_inter_token']:.1%} to the median time between tokens")
    return None


if __name__ == "__main__":
    main()
