"""Measures inter-token time while a prompt arrives, and the time from cancel to the end.

    python benchmarks/latency.py MODEL_OR_CONFIG [--load-format dummy] [--step-ms 100] [--json]

Eight requests decode while a long prompt arrives. Their inter-token times before and during its
prefill are compared with `step_ms` (the promise: at most twice). Then requests are cancelled at
random moments of prefill and decode (the promise: the terminal event within 200 ms).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import threading
import time
from typing import Any

import turbomind

DECODERS = 8
CANCEL_TRIALS = 40


def random_ids(length: int, vocab: int, rng: random.Random) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def decode_until(engine: turbomind.Engine, ids: list[int], stop: threading.Event) -> list[float]:
    """Returns the times at which tokens arrived, in seconds."""
    times = []
    with engine.stream(ids, temperature=0, ignore_eos=True) as stream:
        for event in stream:
            if event.token_ids:
                times.append(time.perf_counter())
            if stop.is_set():
                break
    return times


def interference(
    engine: turbomind.Engine, vocab: int, prompt_tokens: int, rng: random.Random
) -> dict[str, Any]:
    """Returns inter-token milliseconds of eight requests before and during a long prefill."""
    stop = threading.Event()
    results: list[list[float]] = []
    prompts = [random_ids(64, vocab, rng) for _ in range(DECODERS)]
    threads = [
        threading.Thread(target=lambda ids=ids: results.append(decode_until(engine, ids, stop)))
        for ids in prompts
    ]
    for thread in threads:
        thread.start()
    time.sleep(4)
    arrival = time.perf_counter()
    engine.generate(random_ids(prompt_tokens, vocab, rng), max_new_tokens=1, temperature=0)
    done = time.perf_counter()
    stop.set()
    for thread in threads:
        thread.join()
    quiet, busy = [], []
    for times in results:
        for a, b in itertools.pairwise(times):
            if arrival - 2 <= a and b <= arrival:
                quiet.append((b - a) * 1e3)
            elif (
                arrival < b and a < done
            ):  # The steps in which the prompt arrived and ended count too.
                busy.append((b - a) * 1e3)
    return {
        "prompt_tokens": prompt_tokens,
        "prefill_seconds": done - arrival,
        "quiet_ms": summary(quiet),
        "during_prefill_ms": summary(busy),
    }


def cancels(
    engine: turbomind.Engine, vocab: int, prompt_tokens: int, rng: random.Random
) -> dict[str, float]:
    """Returns milliseconds from cancel() to the terminal event, at random moments."""
    times = []
    for _ in range(CANCEL_TRIALS):
        stream = engine.stream(
            random_ids(prompt_tokens, vocab, rng), temperature=0, ignore_eos=True
        )
        reader = threading.Thread(target=lambda s=stream: [None for _ in s])
        reader.start()
        time.sleep(rng.uniform(0, 3))
        start = time.perf_counter()
        stream.cancel()
        reader.join()
        times.append((time.perf_counter() - start) * 1e3)
    return summary(times)


def summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with turbomind.Engine(
        args.model,
        device="cpu",
        load_format=args.load_format,
        step_ms=args.step_ms,
        threads=args.threads,
    ) as engine:
        vocab = engine.vocab_size
        result = {
            "step_ms": args.step_ms,
            "interference": interference(engine, vocab, args.prompt_tokens, rng),
            "cancel_ms": cancels(engine, vocab, args.prompt_tokens, rng),
        }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    inter = result["interference"]
    print(f"prefill of {inter['prompt_tokens']} tokens took {inter['prefill_seconds']:.2f} s")
    for name in ("quiet_ms", "during_prefill_ms"):
        print(f"inter-token {name}: {inter[name]}  (limit {2 * args.step_ms:.0f} ms)")
    print(f"cancel to terminal event: {result['cancel_ms']} ms  (limit 200 ms)")


if __name__ == "__main__":
    main()
