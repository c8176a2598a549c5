"""Ranks against one rank on the same threads: one table in about five minutes.

The shape is Qwen2.5-0.5B with dummy bfloat16 weights. Its 14 heads are cut over 2 ranks; for 4
ranks they are 16 narrower ones of the same width together. Rounds of both engines take turns, so
that a slower minute of the machine meets each of them.

    python benchmarks/tensor_parallel.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapes import SHAPES

from lmchat.cli.bench.measure import Bench, Ceilings, cpu_ceilings
from turbomind import _C, Engine

CONTEXT, PREFILL, BATCHES = 128, 512, (1, 16)
# What a number of ranks reaches of one rank's speed, at least: decode, prefill.
BARS = {2: (0.93, 0.92), 4: (0.5, 0.5)}
MORE_WEIGHTS = 0.01  # of all ranks together, beside KV heads that are replicated


def config_for(ranks: int) -> dict[str, Any]:
    """Returns a config whose heads can be cut over so many ranks."""
    config = SHAPES["qwen2.5-0.5b"].config()
    if config["num_attention_heads"] % ranks:
        config |= {"num_attention_heads": 16, "head_dim": config["hidden_size"] // 16}
    return config


def opened(config: dict[str, Any], folder: Path, options: dict[str, Any]) -> Engine:
    """Returns an engine with dummy weights of a config."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Engine(
        folder, load_format="dummy", cache_memory="512MiB", max_batch_size=max(BATCHES), **options
    )


def speeds(benches: list[Bench], rounds: int, measure: Callable[[Bench], float]) -> list[float]:
    """Returns the median of the seconds that `measure` returns for each, in turns."""
    seconds: list[list[float]] = [[] for _ in benches]
    for number in range(rounds):
        order = list(enumerate(benches))
        for i, bench in order if number % 2 else reversed(order):
            seconds[i].append(measure(bench))
    return [statistics.median(each) for each in seconds]


def replicated_bytes(ranks: int, config: dict[str, Any]) -> int:
    """Returns the bytes of the K and V rows that more than one rank has."""
    copies = max(0, ranks - int(config["num_key_value_heads"]))
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return int(copies * 2 * width * config["hidden_size"] * 2 * config["num_hidden_layers"])


def table(ranks: int, benches: list[Bench], rounds: int, steps: int) -> list[str]:
    """Measures an engine of one rank and one of several and returns rows of the table."""
    decode_bar, prefill_bar = BARS[ranks]
    parts: list[tuple[str, float, Callable[[Bench], float]]] = [
        (
            f"decode, batch {batch}",
            decode_bar,
            lambda b, batch=batch: b.decode(batch, CONTEXT, steps, 1).step_seconds,
        )
        for batch in BATCHES
    ]
    parts.append((f"prefill {PREFILL}", prefill_bar, lambda b: b.prefill(PREFILL, 1).seconds))
    rows = []
    for name, bar, measure in parts:
        one, several = speeds(benches, rounds, measure)
        verdict = "reached" if one / several >= bar else "**missed**"
        rows.append(
            f"| {ranks} | {name} | {one * 1e3:.1f} | {several * 1e3:.1f} | {one / several:.2f} | "
            f"{bar:.2f}: {verdict} |"
        )
    return rows


def weights(ranks: int, engines: list[Engine], config: dict[str, Any]) -> str:
    """Returns a sentence about the memory of the weights."""
    one, several = (engine.weight_bytes for engine in engines)
    more = several - one - replicated_bytes(ranks, config)
    verdict = "reached" if more <= MORE_WEIGHTS * one else "**missed**"
    return (
        f"Weights of {ranks} ranks: {several / 1e6:.1f} MB, of one {one / 1e6:.1f} MB; "
        f"{more / one:+.2%} beside replicated KV heads (goal {MORE_WEIGHTS:.0%}: {verdict})."
    )


def main() -> None:
    """Reads the command line, measures and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=list(BARS))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts")
    parser.add_argument("--steps", type=int, default=24, help="timed decode steps of a round")
    given = parser.parse_args()
    options = {"device": "cpu", "threads": given.threads, "isa": given.isa}
    limits: Ceilings = cpu_ceilings(_C.resolve_isa(given.isa), given.threads, 1 << 30)
    print(f"{limits.name}, {limits.isa}, {limits.threads} threads for all ranks together.\n")
    rows = ["| ranks | | one rank, ms | ranks, ms | speed | goal |", "|---|---|---|---|---|---|"]
    notes = []
    for ranks in given.ranks:
        config = config_for(ranks)
        with (
            tempfile.TemporaryDirectory() as name,
            opened(config, Path(name) / "one", options | {"tp": 1}) as one,
            opened(config, Path(name) / "ranks", options | {"tp": ranks}) as several,
        ):
            benches = [Bench(engine, limits) for engine in (one, several)]
            rows += table(ranks, benches, given.rounds, given.steps)
            notes.append(weights(ranks, [one, several], config))
    print("\n".join([*rows, "", *notes]))


if __name__ == "__main__":
    main()
