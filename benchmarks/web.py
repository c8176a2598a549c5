#!/usr/bin/env python3
"""Measures the chat page in a headless Chromium, and what it costs the engine beside it.

    python benchmarks/web.py [--rounds 3] [--record FILE]

Needs the extra `web`, playwright and chromium. With memo: the time from the start of `lmchat web`
to the text of a first reply on the page, and its memory beside that of `lmchat serve` after one
turn. With random weights of the layers of Qwen2.5-0.5B and memo's tokenizer: opening a session of
200 rounds, updates of the page while a reply runs in it, Stop, and the engine's tokens per second
without a tab and with four tabs that show the reply. Browser, server and engine share the CPUs. It
takes about 3 minutes, and fails where a limit is not met. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from shapes import SHAPES

import turbomind
from lmchat import bundled

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/support/serving")]
from web_page import Tab, Web, browser  # noqa: E402

LIMITS = {
    "usable_seconds": 8.0,
    "memory_mib": 250.0,
    "open_seconds": 3.0,
    "updates_per_second": 5.0,
    "stop_seconds": 0.5,
    "slower_percent": 15.0,
}
ROUNDS, TABS = 200, 4
TOKENS = 256  # of a reply whose speed is measured
SECONDS = 5  # of counting updates
QUESTION = "What is a *page table*?"
ANSWER = "A **tree** that maps pages to frames:\n\n```c\nentry = table[index];\n```"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
COUNT = """seconds => new Promise(done => {
  const seen = new Set();
  const end = performance.now() + 1000 * seconds;
  const look = () => {
    seen.add(document.querySelector("#last .bot-row:last-child .prose")?.textContent);
    performance.now() < end ? requestAnimationFrame(look) : done(seen.size - 1);
  };
  look();
})"""
STOP = """() => new Promise(done => {
  const begin = performance.now();
  document.querySelector("#box .stop-button").click();
  const look = () => {
    const seconds = (performance.now() - begin) / 1000;
    const isOver = document.querySelector("#last .ending")?.textContent.startsWith("Stopped.");
    isOver || seconds > 20 ? done(seconds) : requestAnimationFrame(look);
  };
  look();
})"""


def chat_model(folder: Path) -> Path:
    """Writes a config with the layers of Qwen2.5-0.5B, and memo's tokenizer. Returns the folder."""
    shutil.copytree(bundled.FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    memo = json.loads((folder / "config.json").read_text())
    ends = {name: memo[name] for name in ("bos_token_id", "eos_token_id")}
    shape = SHAPES["qwen2.5-0.5b"]
    shape = replace(shape, vocab=memo["vocab_size"], hf={**shape.hf, **ends})
    (folder / "config.json").write_text(json.dumps(shape.config()))
    return folder


def memory(web: Web) -> float:
    """Returns the resident MiB of a server."""
    pages = Path(f"/proc/{web.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def api(web: Web, method: str, path: str, body: Any = None) -> Any:
    """Sends a request for sessions and returns the answer."""
    answer = httpx.request(method, f"{web.url}/v1/sessions{path}", json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()


def new_session(web: Web, rounds: int = 0) -> str:
    """Creates a session and returns its id."""
    session = str(api(web, "POST", "", {"title": "Measured", "settings": GREEDY})["id"])
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    if rounds:
        api(web, "POST", f"/{session}/append", {"messages": messages * rounds})
    return session


def turn(web: Web, session: str, tokens: int) -> dict[str, Any]:
    """Returns the reply of a turn over HTTP."""
    settings = {"max_new_tokens": tokens}
    body = {"text": QUESTION, "settings": settings}
    found: dict[str, Any] = api(web, "POST", f"/{session}/turns", body)
    return found


def start(chromium: Any, folder: Path) -> dict[str, float]:
    """Returns the seconds until the page of memo is usable, and its memory beside a server's."""
    options = ("memo", "--cache-memory", "64MiB", "--log-level", "error")
    begin = time.perf_counter()
    with Web(folder / "web", *options) as web:
        listens = time.perf_counter() - begin
        tab = Tab(chromium, web.url)
        tab.send(QUESTION)
        tab.wait_for_reply(1)
        usable = time.perf_counter() - begin
        tab.wait_for_end()
        turn(web, tab.session, 64)
        page = memory(web)
        tab.page.close()
    with Web(folder / "serve", *options, verb="serve") as server:
        turn(server, new_session(server), 64)
        turn(server, new_session(server), 64)
        alone = memory(server)
    return {
        "listening_seconds": listens,
        "usable_seconds": usable,
        "serve_mib": alone,
        "memory_mib": page - alone,
    }


def long_session(chromium: Any, web: Web, rounds: int) -> dict[str, Any]:
    """Returns the figures of a session of 200 rounds: opening it, updates and Stop."""
    session = new_session(web, ROUNDS - 1)
    turn(web, session, 16)  # computes the whole prompt
    begin = time.perf_counter()
    tab = Tab(chromium, f"{web.url}/?session={session}")
    tab.page.get_by_role("group", name=f"Round {ROUNDS}", exact=True).wait_for()
    opened = time.perf_counter() - begin
    updates, stops = [], []
    for number in range(rounds):
        tab.send(QUESTION)
        tab.page.get_by_role("group", name=f"Round {ROUNDS + 1 + number}", exact=True).wait_for()
        tab.wait_for_reply(1)
        updates.append(tab.page.evaluate(COUNT, SECONDS) / SECONDS)
        stops.append(tab.page.evaluate(STOP))
        stored = api(web, "GET", f"/{session}?details=true")["turns"][-1]["text"]
        tab.wait_for_text(stored)  # fails where the page shows another text
    tab.page.close()
    return {
        "open_seconds": opened,
        "updates_per_second": min(updates),
        "updates_of_each": updates,
        "stop_seconds": max(stops),
        "stop_of_each": stops,
    }


def four_tabs(chromium: Any, web: Web, rounds: int) -> dict[str, Any]:
    """Returns the engine's tokens per second without and with tabs, alternately."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    turn(web, new_session(web), 16)
    for _ in range(rounds):
        for has_tabs in speeds:
            session = new_session(web)
            address = f"{web.url}/?session={session}"
            tabs = [Tab(chromium, address) for _ in range(TABS * has_tabs)]
            reply = turn(web, session, TOKENS)
            speeds[has_tabs].append(1 / reply["timings"]["tpot"])
            for tab in tabs:
                tab.wait_for_text(reply["text"])
                tab.page.close()
    alone, shown = (statistics.median(values) for values in speeds.values())
    return {
        "tokens_per_second": speeds[False],
        "tokens_per_second_with_tabs": speeds[True],
        "slower_percent": 100 * (1 - shown / alone),
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """Returns the names of limits that are not met."""
    return [
        name for name, limit in LIMITS.items()
        if (figures[name] < limit if name == "updates_per_second" else figures[name] > limit)
    ]  # fmt: skip


def rounded(value: Any) -> Any:
    """Returns a figure with three places."""
    return [round(one, 3) for one in value] if isinstance(value, list) else round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of streams, stops and tabs")
    parser.add_argument("--record", type=Path, help="file to write the figures to, as JSON")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, browser() as chromium:
        folder = Path(temporary)
        figures |= start(chromium, folder)
        model = chat_model(folder / "model")
        options = ("--load-format", "dummy", "--log-level", "error")
        with Web(folder / "home", model, *options) as web:
            figures |= long_session(chromium, web, given.rounds)
            figures |= four_tabs(chromium, web, given.rounds)
    figures = {name: rounded(value) for name, value in figures.items()}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    record = {
        "cpu": cpu[1] if cpu else "",
        "isa": turbomind.available_isas()[-1],
        "cpus": os.cpu_count(),
        "limits": LIMITS,
        "figures": figures,
        "missed": missed(figures),
    }
    print(json.dumps(record, indent=1))
    if given.record:
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    if record["missed"]:
        raise SystemExit(f"limits that are not met: {', '.join(record['missed'])}")


if __name__ == "__main__":
    main()
