#!/usr/bin/env python3
"""Measures how requests share an engine: steps, tokens computed and seconds.

    python benchmarks/scheduling.py MODEL [--load-format dummy] [--json]

Three cases, each with random tokens:

- beside: a prompt of 100 tokens that comes while one of 8,000 is computed; to its first token.
- equal: eight equal prompts of 600 tokens at once; the tokens that the prefill computes, over 600.
- tight: two prompts of 2,048 tokens with replies of 512, in a cache of 1.1 times the prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from turbomind import Engine
from turbomind.engine.stats import Stats

LONG, SHORT = 8000, 100
EQUAL, EQUAL_TOKENS = 8, 600
PROMPT, NEW = 2048, 512
PAGE = 64
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def tokens(engine: Engine, count: int) -> list[int]:
    dice = random.Random(time.time_ns())
    return [dice.randrange(engine.vocab_size) for _ in range(count)]


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Returns seconds and steps to the first token of a prompt."""
    steps, begin = engine.stats().steps, time.perf_counter()
    engine.generate(prompt, max_new_tokens=1, **GREEDY)
    return time.perf_counter() - begin, engine.stats().steps - steps


def beside(engine: Engine) -> dict[str, Any]:
    first_token(engine, tokens(engine, SHORT))
    alone, _ = first_token(engine, tokens(engine, SHORT))
    before = engine.stats()
    with engine.stream(tokens(engine, LONG), max_new_tokens=1, **GREEDY) as long:
        while engine.stats().steps < before.steps + 2:
            time.sleep(0.001)
        seconds, steps = first_token(engine, tokens(engine, SHORT))
        long.result()
    return {"alone_s": alone, "beside_s": seconds, "beside_steps": steps}


def equal(engine: Engine) -> dict[str, Any]:
    before, prompt = engine.stats(), tokens(engine, EQUAL_TOKENS)
    begin = time.perf_counter()
    streams = [engine.stream(prompt, max_new_tokens=1, **GREEDY) for _ in range(EQUAL)]
    for stream in streams:
        stream.result()
    computed = engine.stats().tokens_prefilled - before.tokens_prefilled
    return {"computed_per_prompt_tokens": computed / EQUAL_TOKENS, "s": time.perf_counter() - begin}


def tight(arguments: argparse.Namespace) -> dict[str, Any]:
    pages = int(1.1 * 2 * PROMPT / PAGE)
    options = {**options_of(arguments), "cache_memory": None, "cache_pages": pages}
    with Engine(arguments.model, **options) as engine:
        before = engine.stats()
        streams = [
            engine.stream(tokens(engine, PROMPT), max_new_tokens=NEW, **GREEDY) for _ in range(2)
        ]
        for stream in streams:
            stream.result()
        after = engine.stats()
    return {
        "preemptions": after.preemptions - before.preemptions,
        "tokens_recomputed": after.tokens_recomputed - before.tokens_recomputed,
        "prefill_per_prompt_tokens": (after.tokens_prefilled - before.tokens_prefilled)
        / (2 * PROMPT),
    }


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"load_format": arguments.load_format, "device": arguments.device}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with Engine(arguments.model, **options_of(arguments)) as engine:
        result: dict[str, Any] = {"beside": beside(engine), "equal": equal(engine)}
        stats: Stats = engine.stats()
        result["queue_s_per_request"] = stats.queue_seconds / stats.requests_started
    result["tight"] = tight(arguments)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder with a model, or a config.json with dummy weights")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    one, same, small = result["beside"], result["equal"], result["tight"]
    print(f"{SHORT} tokens alone {one['alone_s']:.2f} s; beside {LONG:,} {one['beside_s']:.2f} s,")
    print(f"  {one['beside_steps']} steps")
    print(f"{EQUAL} equal prompts compute {same['computed_per_prompt_tokens']:.2f} times one")
    print(f"a tight cache: {small['preemptions']} preemptions, prefill", end=" ")
    print(f"{small['prefill_per_prompt_tokens']:.2f} times the prompts")


if __name__ == "__main__":
    main()
