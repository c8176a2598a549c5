"""Many clients chat through the HTTP server for a long time.

Each client holds conversations of several turns, in one of three ways: the history is sent again
with each request, a session is named by a header, or each response names the previous one. What
must hold: no request fails, every reply equals the reply of the same conversation that runs alone
afterwards, no page of KV is leaked, and the process's memory stays level.

The server runs in this process and the clients in another one, so that the memory is the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support" / "serving"))

KINDS = ("history", "session", "responses")
WORDS = "my dog cat is called Waffles Biscuit what name do you know I like red blue tea".split()
MAX_CONTEXT_SHARE = 0.5  # of the context that a conversation's replies may fill
SLACK = 24 << 20  # bytes by which memory may differ: allocators and caches of bounded size


def question(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 12))).capitalize() + "?"


def settings(rng: random.Random) -> dict[str, Any]:
    """Returns settings of one turn that give the same tokens again."""
    found: dict[str, Any] = {
        "max_tokens": rng.choice((8, 16, 32, 48)),
        "temperature": rng.choice((0, 0.8)),
        "seed": rng.getrandbits(31),
    }
    if rng.random() < 0.2:
        found["stop"] = [rng.choice((" a", "e ", ".", " name"))]
    return found


class Client:
    """One client, which holds one conversation after the other until the time is over."""

    def __init__(self, number: int, seed: int, url: str, until: float) -> None:
        self.rng = random.Random(seed * 1000 + number)
        self.number, self.until = number, until
        self.http = httpx.AsyncClient(base_url=url, timeout=120)

    async def run(self) -> None:
        async with self.http:
            count = 0
            while time.monotonic() < self.until:
                count += 1
                kind = KINDS[(self.number + count) % len(KINDS)]
                turns: list[dict[str, Any]] = []
                failed = ""
                try:
                    await self.talk(kind, f"soak-{self.number}-{count}", turns)
                except Exception as error:
                    failed = f"{type(error).__name__}: {error}"
                print(json.dumps({"kind": kind, "turns": turns, "failed": failed}), flush=True)

    async def talk(self, kind: str, name: str, turns: list[dict[str, Any]]) -> None:
        state: Any = [] if kind == "history" else None
        for _ in range(self.rng.randint(2, 7)):
            text, chosen = question(self.rng), settings(self.rng)
            streamed = self.rng.random() < 0.5
            reply, state = await getattr(self, kind)(name, state, text, chosen, streamed)
            turns.append({"text": text, "settings": chosen, "reply": reply})
        if kind == "session":
            found = (await self.http.get("/v1/sessions", params={"search": name})).json()
            for one in found.get("data", []):
                (await self.http.delete(f"/v1/sessions/{one['id']}")).raise_for_status()

    async def history(
        self, _name: str, state: Any, text: str, chosen: dict[str, Any], streamed: bool
    ) -> tuple[str, Any]:
        messages = [*state, {"role": "user", "content": text}]
        body = {"messages": messages, **chosen}
        reply = await self.chat(body, {}, streamed)
        return reply, [*messages, {"role": "assistant", "content": reply}]

    async def session(
        self, name: str, _state: Any, text: str, chosen: dict[str, Any], streamed: bool
    ) -> tuple[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], **chosen}
        return await self.chat(body, {"x-session-id": name}, streamed), None

    async def responses(
        self, _name: str, state: Any, text: str, chosen: dict[str, Any], _streamed: bool
    ) -> tuple[str, Any]:
        chosen = dict(chosen)
        body = {"input": text, "max_output_tokens": chosen.pop("max_tokens"), **chosen}
        if state is not None:
            body["previous_response_id"] = state
        answer = await self.http.post("/v1/responses", json=body)
        answer.raise_for_status()
        found = answer.json()
        texts = [
            part["text"]
            for item in found["output"]
            if item["type"] == "message"
            for part in item["content"]
        ]
        return "".join(texts), found["id"]

    async def chat(self, body: dict[str, Any], headers: dict[str, str], streamed: bool) -> str:
        path = "/v1/chat/completions"
        if not streamed:
            answer = await self.http.post(path, json=body, headers=headers)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["message"]["content"])
        body = {**body, "stream": True}
        text = ""
        async with self.http.stream("POST", path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(str(chunk["error"]))
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
        return text


async def clients(count: int, seed: int, url: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(*(Client(i, seed, url, until).run() for i in range(count)))


# --- the server's process ----------------------------------------------------------------------


def memory() -> int:
    """Returns the resident memory of this process, in bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def wrong(engine: Any, conversation: dict[str, Any]) -> str:
    """Returns how a conversation differs from one that runs alone; empty if it does not."""
    with engine.session(owner="alone") as session:
        try:
            for number, turn in enumerate(conversation["turns"]):
                given = dict(turn["settings"])
                stops = given.pop("stop", None)
                reply = session.send(
                    turn["text"],
                    max_new_tokens=given.pop("max_tokens"),
                    stop_strings=stops,
                    **given,
                )
                if reply.text != turn["reply"]:
                    return f"turn {number}: {turn['reply']!r}, alone {reply.text!r}"
        finally:
            session.delete()
    return ""


def leaked(engine: Any) -> list[str]:
    """Returns what is still in use after all sessions were deleted."""
    for one in engine.sessions(hidden=True):
        engine.delete(one.name, one.owner)
    engine.core.check_invariants()
    stats = engine.stats()
    found = [f"{stats.slots} slots"] if stats.slots else []
    return found + ([f"{stats.waiting} requests wait"] if stats.waiting else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32, help="number of clients")
    parser.add_argument("--seconds", type=float, default=600, help="duration of the load")
    parser.add_argument("--seed", type=int, default=1, help="seed of what clients send")
    parser.add_argument("--check", type=int, default=2000, help="conversations checked alone")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url:
        asyncio.run(clients(given.clients, given.seed, given.url, given.seconds))
        return 0
    from http_server import RunningServer

    folder = tempfile.TemporaryDirectory()
    with (
        folder,
        RunningServer(
            store=folder.name, max_queue=4 * given.clients, cache_memory="64MiB"
        ) as server,
    ):
        found, sizes = load(server, given)
        failed = [one["failed"] for one in found if one["failed"]]
        turns = sum(len(one["turns"]) for one in found)
        engine = server.engine.sync
        whole = [one for one in found if not one["failed"]]
        chosen = random.Random(given.seed).sample(whole, min(given.check, len(whole)))
        differ = [text for one in chosen if (text := wrong(engine, one))]
        left = leaked(engine)
        growth = level(sizes)
    print(f"{len(found)} conversations, {turns} turns, {len(failed)} failed")
    print(f"{len(differ)} of {len(chosen)} conversations differ from those alone")
    print(f"memory {sizes[0] >> 20} to {sizes[-1] >> 20} MiB, growth {growth / (1 << 20):.1f} MiB")
    for text in [*failed[:5], *differ[:5], *left]:
        print("  ", text)
    ok = found and not (failed or differ or left) and growth <= SLACK
    print("passed" if ok else "FAILED")
    return 0 if ok else 1


def load(server: Any, given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[int]]:
    """Runs the clients. Returns their conversations, and the memory during the load."""
    command = [
        sys.executable, "-m", "tests.stress.http_soak", "--url", server.url,
        "--clients", str(given.clients), "--seconds", str(given.seconds), "--seed", str(given.seed),
    ]  # fmt: skip
    sizes = [memory()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(given.seconds / 40):
            sizes.append(memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        ended.set()
        watcher.join()
    return [json.loads(line) for line in done.stdout.splitlines()], sizes


def level(sizes: list[int]) -> float:
    """Returns by how much memory has grown from the second quarter to the last one, in bytes."""
    quarter = max(1, len(sizes) // 4)
    early, late = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
    return statistics.median(late) - statistics.median(early)


if __name__ == "__main__":
    sys.exit(main())
