#!/usr/bin/env python3
"""Measures one conversation beside peers that cache KV: time to first token by turn.

    python benchmarks/turns.py                          # 5 rounds of 20 turns, 0.5B shape
    python benchmarks/turns.py --peers lmchat,llama_server --rounds 3 --turns 30
    python benchmarks/turns.py --quick

lmchat reuses a handle, transformers a DynamicCache as past_key_values, llama.cpp's llama-server its
slot (cache_prompt). Each turn goes to one runtime after the other, in an order that rotates by one
place per turn. At some turns each runtime also computes the whole prompt again. Processes that do
not answer are stopped; each measurement waits for a quiet machine (disturbance.py). Figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from datetime import datetime, timezone
from typing import Any

from disturbance import lines_of
from peer_process import OURS, PEERS, Peer, llama_cpp_environment
from peers.runner_protocol import MAX_CONTEXT
from report import header, machine_facts, named, number, versions_line, write
from rounds import Rounds, add_common, names_of
from shapes import SHAPES, Shape

SERVER = Peer(
    "llama_server",
    "llama.cpp llama-server, bf16, cache_prompt",
    llama_cpp_environment,
    installed_with="llama_cpp",
)
TURN_PEERS = {OURS: PEERS[OURS], "transformers": PEERS["transformers"], SERVER.name: SERVER}


class Conversations(Rounds):
    """Runs the same number of equal turns on every runtime, round after round."""

    def __init__(self, arguments: argparse.Namespace, shape: Shape) -> None:
        super().__init__(arguments.dir, arguments.cpus, shape)
        self.arguments = arguments
        self.history: dict[int, int] = {}
        self.samples: dict[str, dict[str, dict[int, list[float]]]] = {}

    def run(self) -> dict[str, Any]:
        """Loads, warms up and converses in rounds. The processes always end."""
        with self:
            for name in self.arguments.peers:
                self.guarded(name, self.load)
            for name in list(self.peers):
                self.guarded(name, self.warm_up)
            for index in range(self.arguments.rounds):
                self.round(index)
        return self.result()

    def load(self, name: str) -> None:
        self.start(name, TURN_PEERS[name], max_batch=1)
        self.samples[name] = {"cached": {}, "recomputed": {}}

    def warm_up(self, name: str) -> None:
        request = {"new": self.arguments.new, "reply": 4, "seed": self.seed()}
        self.peers[name].ask({"op": "chat_start"})
        self.peers[name].ask({"op": "chat_turn", **request})
        self.peers[name].ask({"op": "chat_again"})

    def round(self, index: int) -> None:
        for name in list(self.peers):
            self.guarded(name, lambda name: self.peers[name].ask({"op": "chat_start"}))
        for turn in range(1, self.arguments.turns + 1):
            for name in self.turned(index + turn):
                self.guarded(name, self.turn, turn)
            if turn in self.arguments.again:
                for name in self.turned(index + turn):
                    self.guarded(name, self.again, turn)
            self.print_turn(index, turn)

    def turn(self, name: str, turn: int) -> None:
        request = {"op": "chat_turn", "new": self.arguments.new, "reply": self.arguments.reply}
        answer = self.measured(name, f"turn {turn}", request, repeatable=False)
        self.history[turn] = answer["history"]
        self.samples[name]["cached"].setdefault(turn, []).append(answer["seconds"] * 1e3)

    def again(self, name: str, turn: int) -> None:
        answer = self.measured(name, f"turn {turn} again", {"op": "chat_again"})
        self.samples[name]["recomputed"].setdefault(turn, []).append(answer["seconds"] * 1e3)

    def print_turn(self, index: int, turn: int) -> None:
        parts = []
        for name in self.peers:
            for kind, turns in self.samples[name].items():
                if len(turns.get(turn, [])) == index + 1:
                    parts.append(f"{name} {kind} {number(turns[turn][-1])}")
        self.say(f"round {index + 1} turn {turn}", ", ".join(parts) + " ms")

    def result(self) -> dict[str, Any]:
        return {
            "turns": self.arguments.turns,
            "new_tokens": self.arguments.new,
            "reply_tokens": self.arguments.reply,
            "history_tokens": self.history,
            "failures": self.failures,
            "disturbances": self.watch.records,
            "peers": {
                name: {
                    "versions": self.versions[name],
                    "ttft_ms": {
                        kind: {turn: figure(values) for turn, values in turns.items()}
                        for kind, turns in kinds.items()
                    },
                }
                for name, kinds in self.samples.items()
            },
        }


def figure(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "samples": values,
    }


def markdown(result: dict[str, Any]) -> str:
    """Returns the whole report."""
    lines = header("Time to the first token by turn", result)
    for name, model in result["models"].items():
        lines += ["", f"## {name} shape", ""]
        lines += [
            f"Milliseconds to the first token of turns of {model['new_tokens']} new tokens, each "
            f"answered with {model['reply_tokens']}; token ids throughout. Cached: the KV of the "
            "past is cached. Recomputed: the same prompt with nothing of it there.",
            "",
            *table(model),
        ]
        lines += ["", *lines_of(model["disturbances"])]
        for peer, reason in model["failures"].items():
            lines += ["", f"{TURN_PEERS[peer].label} failed: {reason.splitlines()[0]}"]
    return "\n".join([*lines, "", versions_line(result)]) + "\n"


def table(model: dict[str, Any]) -> list[str]:
    """Returns a row per turn: cached and recomputed times of each runtime, the best cached bold."""
    order = [name for name in TURN_PEERS if name in model["peers"]]
    heads = [
        f"{TURN_PEERS[name].label}, {kind}" for name in order for kind in ("cached", "recomputed")
    ]
    lines = [
        "| turn | history tokens | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for turn, history in model["history_tokens"].items():
        figures = {name: model["peers"][name]["ttft_ms"] for name in order}
        best = min(f["cached"][turn]["median"] for f in figures.values() if turn in f["cached"])
        cells = [
            cell(figures[name][kind].get(turn), best if kind == "cached" else None)
            for name in order
            for kind in ("cached", "recomputed")
        ]
        lines.append(f"| {turn} | {history:,} | " + " | ".join(cells) + " |")
    return lines


def cell(figure: dict[str, Any] | None, best: float | None) -> str:
    if figure is None:
        return ""
    median = number(figure["median"])
    median = f"**{median}**" if figure["median"] == best else median
    return f"{median}<br>{number(figure['min'])} - {number(figure['max'])}"


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = list(TURN_PEERS)
    parser.add_argument("--peers", type=names_of(TURN_PEERS), default=peers, metavar="A,B")
    parser.add_argument(
        "--models", type=names_of(SHAPES), default=["qwen2.5-0.5b"], metavar="A,B",
        help="default: qwen2.5-0.5b",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="conversations; default: 5")
    parser.add_argument("--turns", type=int, default=20, help="default: 20")
    parser.add_argument("--new", type=int, default=64, help="tokens a turn adds; default: 64")
    parser.add_argument("--reply", type=int, default=64, help="tokens of a reply; default: 64")
    parser.add_argument(
        "--again", type=lambda text: [int(turn) for turn in text.split(",")],
        default=[2, 5, 10, 15, 20], metavar="N,M",
        help="turns whose prompt is also computed again; default: 2,5,10,15,20",
    )  # fmt: skip
    add_common(parser)
    arguments = parser.parse_args(argv)
    arguments.dir = arguments.dir.resolve()
    if arguments.quick:
        arguments.rounds, arguments.turns, arguments.reply, arguments.again = 1, 3, 8, [2]
    if arguments.turns * (arguments.new + arguments.reply) > MAX_CONTEXT:
        parser.error(f"a conversation is longer than {MAX_CONTEXT} tokens: lower --turns")
    for model in arguments.models:
        if not (arguments.dir / "models" / model / "model.safetensors").exists():
            parser.error(f"no checkpoint of {model}: run benchmarks/make_models.py first")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = arguments_of(argv)
    started = time.time()
    result: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_facts(arguments.cpus),
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "models": {},
    }
    for model in arguments.models:
        result["models"][model] = Conversations(arguments, SHAPES[model]).run()
    result["seconds"] = round(time.time() - started)
    write(result, markdown(result), f"{arguments.name or named(result)}-turns")
    return 1 if any(model["failures"] for model in result["models"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
