#!/usr/bin/env python3
"""Measures lmchat and its peers side by side on this machine and writes the table.

    python benchmarks/compare.py                                   # 5 rounds of both models
    python benchmarks/compare.py --models qwen2.5-0.5b --rounds 7
    python benchmarks/compare.py --peers lmchat,transformers --quick
    python benchmarks/compare.py --peers lmchat,lmchat-int8,lmchat-int4,llama_cpp-q4_0

Run it with the Python that has the project installed. Every runtime keeps its model loaded in a
process of its own. Within a round the runtimes are measured one after the other, and all but one
are stopped (SIGSTOP). Each measurement waits for a quiet machine and is repeated when others used
its CPUs (disturbance.py). Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from peer_process import OURS, PEERS, SIXTEEN_BIT
from report import machine_facts, markdown, named, write
from rounds import Rounds, add_common, names_of
from shapes import SHAPES, Shape

MAX_BATCH = 16
HISTORY, NEW = 1500, 64
STEPS_HELP = "decode steps timed, twice as many at batch 1; default: 16"


@dataclass(frozen=True)
class Measurement:
    """One column of the table: a request to the runners and the number of tokens it processes."""

    key: str
    request: dict[str, Any]
    warm_up: dict[str, Any] | None

    def value(self, answer: dict[str, Any]) -> float:
        """Returns tokens per second, or for a turn the milliseconds to the first token."""
        if self.request["op"] == "decode":
            return float(answer["tokens"] / answer["seconds"])
        if self.request["op"] == "prefill" and not self.key.startswith("turn"):
            return float(self.request["tokens"] / answer["seconds"])
        return float(answer["seconds"] * 1e3)


def measurements(arguments: argparse.Namespace) -> list[Measurement]:
    columns = []
    prefills = (512,) if arguments.quick else (512, 2048)
    steps, context = (8, 128) if arguments.quick else (arguments.steps, 512)
    for tokens in prefills:
        request = {"op": "prefill", "tokens": tokens}
        columns.append(Measurement(f"prefill_{tokens}", request, request))
    for batch in (1, 8, 16):
        count = steps if batch > 1 else 2 * steps
        request = {"op": "decode", "batch": batch, "context": context, "steps": count}
        columns.append(
            Measurement(f"decode_b{batch}", request, {**request, "context": 64, "steps": 4})
        )
    if arguments.turns:
        request = {"op": "turn", "history": HISTORY, "new": NEW}
        columns.append(Measurement("turn_kept_ms", request, request))
        request = {"op": "prefill", "tokens": HISTORY + NEW}
        columns.append(Measurement("turn_again_ms", request, None))
    return columns


class Comparison(Rounds):
    """Measures all runtimes on one model."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape) -> None:
        super().__init__(arguments.dir, arguments.cpus, shape)
        self.arguments = arguments
        self.columns = measurements(arguments)
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.ceilings: list[dict[str, Any]] = []
        self.reads: list[float] = []  # beside each of our decode_b1 samples

    def run(self) -> dict[str, Any]:
        """Loads, warms up and measures in rounds. The processes always end."""
        with self:
            for name in self.arguments.peers:
                self.guarded(name, self.load)
            for name in list(self.peers):
                self.guarded(name, self.warm_up)
            for index in range(self.arguments.rounds):
                self.round(index)
        return self.result()

    def load(self, name: str) -> None:
        self.start(name, PEERS[name], MAX_BATCH)
        self.samples[name] = {column.key: [] for column in self.columns}

    def warm_up(self, name: str) -> None:
        if not PEERS[name].stays_warm:
            return
        started = time.perf_counter()
        for column in self.columns:
            if column.warm_up:
                self.peers[name].ask({**column.warm_up, "seed": self.seed()})
        self.say(name, f"warmed up in {time.perf_counter() - started:.1f} s")

    def round(self, index: int) -> None:
        if OURS in self.peers:
            self.guarded(OURS, self.measure_ceilings)
        for column in self.columns:
            for name in self.turned(index):
                self.guarded(name, self.measure, column, index)

    def measure_ceilings(self, name: str) -> None:
        products = [[key, 512, n, k] for key, (n, k) in self.shape.layer_products().items()]
        self.ceilings.append(self.ask_ceilings(name, products))

    def ask_ceilings(self, name: str, products: list[list[Any]]) -> dict[str, Any]:
        request = {"op": "ceilings", "buffer_bytes": self.shape.decode_weight_bytes()}
        return self.peers[name].ask({**request, "products": products})

    def measure(self, name: str, column: Measurement, index: int) -> None:
        answer = self.measured(name, f"round {index + 1} {column.key}", column.request)
        value = column.value(answer)
        self.samples[name][column.key].append(value)
        if name == OURS and column.key == "decode_b1":
            self.reads.append(self.ask_ceilings(name, [])["read"])
        self.say(name, f"round {index + 1} {column.key} {value:.1f}")

    def result(self) -> dict[str, Any]:
        peers = {
            name: {
                "versions": self.versions[name],
                "figures": {
                    key: {
                        "median": statistics.median(values),
                        "min": min(values),
                        "max": max(values),
                        "samples": values,
                    }
                    for key, values in samples.items()
                    if values
                },
            }
            for name, samples in self.samples.items()
        }
        result: dict[str, Any] = {"peers": peers, "failures": self.failures}
        result["disturbances"] = self.watch.records
        result["columns"] = [column.key for column in self.columns]
        if self.ceilings:
            result["ceilings"] = ceilings_of(self.ceilings) | self.read_fractions()
        return result

    def read_fractions(self) -> dict[str, Any]:
        """Returns decode at batch 1 as a fraction of the read bandwidth measured right after it.

        A shared host changes its memory speed within a minute, so only measurements taken next to
        each other compare.
        """
        if not self.reads:
            return {}
        moved = [
            speed * self.shape.decode_weight_bytes() for speed in self.samples[OURS]["decode_b1"]
        ]
        parts = [a / b for a, b in zip(moved, self.reads, strict=True)]
        return {"decode_b1_of_read": parts, "read_beside_decode_b1": self.reads}


def ceilings_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best round of each ceiling (noise only lowers it) and medians of the products."""
    products = samples[0]["products"]
    return {
        "read": max(sample["read"] for sample in samples),
        "tiles": max(sample["tiles"] for sample in samples),
        "products": {
            name: statistics.median(sample["products"][name] for sample in samples)
            for name in products
        },
    }


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=names_of(PEERS), default=SIXTEEN_BIT, metavar="A,B")
    parser.add_argument("--models", type=names_of(SHAPES), default=list(SHAPES), metavar="A,B")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--steps", type=int, default=16, help=STEPS_HELP)
    parser.add_argument("--turns", action="store_true", help="also time a turn on a cached history")
    add_common(parser)
    arguments = parser.parse_args(argv)
    arguments.dir = arguments.dir.resolve()
    if arguments.quick:
        arguments.rounds = 1
    for model in arguments.models:
        if not (arguments.dir / "models" / model / "model.safetensors").exists():
            parser.error(f"no checkpoint of {model}: run benchmarks/make_models.py first")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = arguments_of(argv)
    started = time.time()
    machine = machine_facts(arguments.cpus)
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "models": {},
    }
    failed = False
    for model in arguments.models:
        outcome = Comparison(arguments, SHAPES[model]).run()
        result["models"][model] = outcome
        failed = failed or bool(outcome["failures"])
    result["seconds"] = round(time.time() - started)
    write(result, markdown(result), arguments.name or named(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
