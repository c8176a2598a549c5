#!/usr/bin/env python3
"""Measures how an owner's live turns fare beside another owner that fills the engine.

    python benchmarks/owners.py [MODEL] [--turns 60] [--json]

One owner runs 16 replies of 2,000 tokens and has 200 requests waiting. Another owner has a session,
whose turns are measured first alone, then beside these: the time to the first token. Between two
turns is a pause of up to 0.2 s, so that turns begin at any moment of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from lmchat import ChatEngine, Overloaded, Session

RUNNING, NEW, WAITING = 16, 2000, 200
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
REPLY = 16  # tokens of a measured turn
PAUSE = 0.2  # the most seconds between two turns


def turns(session: Session, count: int) -> tuple[list[float], int]:
    """Returns seconds to the first token of each turn, and how many turns were refused."""
    seconds, refused = [], 0
    pauses = random.Random(count)
    for number in range(count):
        time.sleep(pauses.uniform(0.0, PAUSE))
        try:
            reply = session.send(f"And number {number}?", max_new_tokens=REPLY, **GREEDY)
        except Overloaded:
            refused += 1
            continue
        seconds.append(reply.timings.ttft)
    return seconds, refused


def p90(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[-1] if len(values) > 1 else values[0]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"max_batch_size": RUNNING, "store": "memory", "max_wait": 3600.0}
    with ChatEngine(arguments.model, **options) as engine:
        new = min(NEW, engine.max_context // 2)
        session = engine.session(owner="live", overflow="drop")
        turns(session, 3)
        idle, _ = turns(session, arguments.turns)
        load = [
            engine.start_generate(f"Story {i}", owner="greedy", max_new_tokens=new, **GREEDY)
            for i in range(RUNNING + WAITING)
        ]
        busy, refused = turns(session, arguments.turns)
        stats = engine.queue_stats()
        for generation in load:
            generation.cancel()
        for generation in load:
            generation.wait()
    return {
        "reply_tokens": new,
        "idle_p90_s": p90(idle),
        "busy_p90_s": p90(busy) if busy else None,
        "ratio": p90(busy) / p90(idle) if busy else None,
        "refused": refused,
        "running": stats.running,
        "waiting": stats.waiting,
        "preempted_for_share": stats.preempted_for_share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a folder with a model; default: memo")
    parser.add_argument("--turns", type=int, default=60, help="turns to measure; default: 60")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")


if __name__ == "__main__":
    main()
