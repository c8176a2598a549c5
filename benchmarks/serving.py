#!/usr/bin/env python3
"""Measures lmchat's HTTP server beside llama-server and vLLM under chats of a rising rate.

    python benchmarks/serving.py --questions question.jsonl --tokenizer tokenizer.json
    python benchmarks/serving.py --trace conv.csv.xz
    python benchmarks/serving.py --servers lmchat --capacity 1.9
    python benchmarks/serving.py --quick

Run it with the Python that has the project installed; peers come from install_peers.py, or by
--llama-server and --vllm. It finds the capacity of lmchat (the highest rate at which 97 % of the
turns finish), then measures every server at fractions of it with `lmchat bench serve`. One server
runs at a time. The result is results/serving.json, .md and .png, written after each rate. With
--keep, servers that are not measured keep their figures of an earlier run on the same machine.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import servers
from disturbance import CALIBRATION_SECONDS, Watch
from make_models import convert
from peer_process import PeerError
from report import machine_facts, write
from rounds import add_common, names_of
from serving_model import write_chat_model
from serving_report import criteria, markdown
from shapes import SHAPES

import turbomind
from lmchat.cli.bench.serving.figures import CAPACITY_SHARE
from lmchat.cli.bench.serving.serve_plot import plot
from turbomind import _C

HERE = Path(__file__).resolve().parent
OURS = "lmchat"
NAMES = (OURS, "llama-server", "vllm")
SHAPE = SHAPES["qwen2.5-0.5b"]
FRACTIONS = "0.1,0.4,0.8,0.9,1,1.1,1.3"
FIRST_RATE, SEARCH_STEP, SEARCH_MINUTES, SEARCH_ROUNDS = 0.5, 2.0, 1.5, 4
TURNS, REPLY_TOKENS, THINK, MAX_WAIT = 6, 128, 10.0, 1.0
LONGEST_PROMPT, LONGEST_REPLY = 7000, 1000  # of the trace; a conversation is at most MAX_CONTEXT


class Comparison:
    """Measures servers, one at a time, and records what disturbed the measurements."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.root: Path = arguments.dir.resolve()
        self.folder = self.root / "models" / f"{SHAPE.name}-chat"
        self.failures: dict[str, str] = {}
        os.sched_setaffinity(0, arguments.cpus)  # servers and clients inherit it
        isa, cpus = turbomind.available_isas()[-1], arguments.cpus
        self.watch = Watch(cpus, lambda: _C.measure_tiles(isa, len(cpus), CALIBRATION_SECONDS))
        (self.root / "logs").mkdir(parents=True, exist_ok=True)

    def server(self, name: str, home: str) -> servers.Server:
        """Returns a server; raises PeerError where it is not installed."""
        arguments = self.arguments
        if name == OURS:
            return servers.ours(self.folder, Path(home), MAX_WAIT)
        binary: Path = getattr(arguments, name.replace("-", "_"))
        if not binary.exists():
            raise PeerError(f"{binary} does not exist: run benchmarks/install_peers.py")
        if name == "vllm":
            return servers.vllm(binary, self.folder, self.root, arguments.cpus)
        gguf = self.folder / "model-bf16.gguf"
        python = self.root / "llama_cpp" / "venv" / "bin" / "python"
        convert(self.root / "llama_cpp", gguf, python, HERE / "peers" / "to_gguf.py", self.folder)
        return servers.llama_server(binary, gguf, len(arguments.cpus))

    def measured(
        self, running: servers.Running, rate: float, minutes: float, options: list[str]
    ) -> dict[str, Any]:
        """Returns the report of `lmchat bench serve` at one rate."""
        name = running.server.name
        command = [
            sys.executable, "-m", "lmchat.cli", "bench", "serve", running.url, "--json",
            "--rates", f"{rate:.4g}", "--duration", f"{minutes * 60:g}", *options,
        ]  # fmt: skip
        say(f"{name} at {rate:.3g} turns/s")

        def run() -> dict[str, Any]:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise PeerError(f"lmchat bench serve ended with exit status {done.returncode}")
            report: dict[str, Any] = json.loads(done.stdout)
            return report

        group = running.process.pid  # it leads a session, so its pid is that of its group
        label = f"{name} at {rate:.3g}"
        report: dict[str, Any] = self.watch.measure(label, group, run, repeatable=False)
        return report

    def chat_options(self, server: servers.Server) -> list[str]:
        options = ["--turns", str(TURNS), "--think", f"{THINK:g}"]
        options += ["--reply-tokens", str(REPLY_TOKENS)]
        if self.arguments.quick:
            options += ["--think", "1", "--warmup", "5"]
        if self.arguments.questions:
            options += ["--questions", self.arguments.questions]
        if self.arguments.tokenizer:
            options += ["--tokenizer", self.arguments.tokenizer]
        return [*options, "--sessions"] if server.sessions else options

    def trace_options(self) -> list[str]:
        options = ["--trace", self.arguments.trace, "--arrivals", "trace"]
        options += ["--longest-message", str(LONGEST_PROMPT)]
        return [*options, "--longest-reply", str(LONGEST_REPLY)]

    def capacity(self, running: servers.Running) -> float:
        """Returns the highest rate at which CAPACITY_SHARE of the turns finish, within 5 %."""
        minutes = min(SEARCH_MINUTES, self.arguments.minutes)
        options = [*self.chat_options(running.server), "--null-seconds", "0"]

        def holds(rate: float) -> bool:
            report = self.measured(running, rate, minutes, options)
            return (report["rates"][0]["finished_share"] or 0.0) >= CAPACITY_SHARE

        rate = self.arguments.first_rate
        while not holds(rate):
            rate /= SEARCH_STEP
        low, high = rate, rate * SEARCH_STEP
        while holds(high):
            low, high = high, high * SEARCH_STEP
        for _ in range(SEARCH_ROUNDS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def run(self, found: dict[str, Any], save: Callable[[], None]) -> None:
        """Measures all servers.

        Args:
            found: Gets "capacity", and in "chats" and "trace": server -> list of reports.
            save: Called after each rate.
        """
        arguments = self.arguments
        write_chat_model(SHAPE, self.folder)
        for name in arguments.servers:
            found["chats"].pop(name, None)
            found["trace"].pop(name, None)
            try:
                with tempfile.TemporaryDirectory() as home:
                    server = self.server(name, home)
                    with servers.Running(server, self.root / "logs" / f"serve-{name}.log") as up:
                        self.measure_server(up, found, save)
            except (PeerError, OSError, subprocess.CalledProcessError) as error:
                say(f"{name}: FAILED: {error}")
                self.failures[name] = str(error)
                if found["capacity"] is None:
                    break  # the others are measured at fractions of the capacity

    def measure_server(
        self, up: servers.Running, found: dict[str, Any], save: Callable[[], None]
    ) -> None:
        """Measures one server at all rates."""
        arguments, name = self.arguments, up.server.name
        if found["capacity"] is None:
            found["capacity"] = self.capacity(up)
            say(f"capacity: {found['capacity']:.3g} turns/s")
        options = self.chat_options(up.server)
        for fraction in arguments.fractions:
            rate = fraction * found["capacity"]
            report = self.measured(up, rate, arguments.minutes, options)
            found["chats"].setdefault(name, []).append(report)
            save()
        for rate in arguments.trace_rates if arguments.trace else ():
            report = self.measured(up, rate, arguments.minutes, self.trace_options())
            found["trace"].setdefault(name, []).append(report)
            save()


def figures_of(reports: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [figures for report in each for figures in report["rates"]]
        for name, each in reports.items()
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def numbers(text: str) -> list[float]:
    return sorted(float(part) for part in text.split(","))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.set_defaults(name="serving")
    parser.add_argument("--servers", type=names_of(NAMES), default=list(NAMES), metavar="NAMES",
                        help=f"default: {','.join(NAMES)}")  # fmt: skip
    parser.add_argument("--questions", metavar="FILE", help="lengths of messages, as MT-bench has")
    parser.add_argument("--tokenizer", metavar="FILE",
                        help="tokenizer.json that counts the tokens of --questions; those of the "
                        "model are characters")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="also measure the requests of this trace")
    parser.add_argument("--trace-rates", type=numbers, default=[0.05, 0.1, 0.2], metavar="R,S",
                        help="requests/s of the trace; default: 0.05,0.1,0.2")  # fmt: skip
    parser.add_argument("--capacity", type=float, metavar="RATE",
                        help="turns/s of lmchat; default: found first")  # fmt: skip
    parser.add_argument("--first-rate", type=float, default=FIRST_RATE, metavar="RATE",
                        help=f"where the search begins; default: {FIRST_RATE:g}")  # fmt: skip
    parser.add_argument("--fractions", type=numbers, default=numbers(FRACTIONS), metavar="F,G",
                        help=f"of the capacity; default: {FRACTIONS}")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, help="per rate; default: 5")
    parser.add_argument("--keep", action="store_true",
                        help="keep the figures of servers that are not measured now")  # fmt: skip
    parser.add_argument("--llama-server", type=Path, metavar="PATH",
                        help="default: that of install_peers.py")  # fmt: skip
    parser.add_argument("--vllm", type=Path, metavar="PATH",
                        help="default: that of install_peers.py")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.fractions = 0.2, [0.1, 0.8, 1.2]
    root = arguments.dir.resolve()
    arguments.llama_server = (
        arguments.llama_server or root / "llama_cpp" / "build" / "bin" / "llama-server"
    )
    arguments.vllm = arguments.vllm or root / "vllm" / "venv" / "bin" / "vllm"
    if OURS not in arguments.servers and arguments.capacity is None and not arguments.keep:
        parser.error(f"--capacity or --keep is needed where {OURS} is not measured")
    return arguments


def kept(arguments: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run has found, with --keep, else nothing.

    Raises:
        SystemExit: the earlier run is of another machine or had other options.
    """
    found: dict[str, Any] = {"capacity": arguments.capacity, "chats": {}, "trace": {}}
    if not arguments.keep:
        return found
    earlier = json.loads((HERE / "results" / f"{arguments.name}.json").read_text())
    now = (machine["cpu"], machine["cpus_used"], arguments.fractions, arguments.minutes)
    machine = earlier["machine"]
    then = (machine["cpu"], machine["cpus_used"], earlier["fractions"], earlier["minutes"])
    if now != then:
        raise SystemExit(f"the earlier run had {then}, expected {now}")
    return {**found, "capacity": found["capacity"] or earlier["capacity"], **earlier["reports"]}


def main() -> int:
    arguments = parsed()
    begin = time.monotonic()
    comparison = Comparison(arguments)
    facts = machine_facts(arguments.cpus)
    found = kept(arguments, facts)

    def save() -> None:
        record(comparison, found, facts, time.monotonic() - begin)

    comparison.run(found, save)
    return len(comparison.failures) if found["chats"] else 1


def record(
    comparison: Comparison, found: dict[str, Any], facts: dict[str, Any], seconds: float
) -> None:
    """Writes all files of the result."""
    arguments, chats = comparison.arguments, figures_of(found["chats"])
    by_fraction = {
        name: dict(zip(arguments.fractions, rates, strict=False)) for name, rates in chats.items()
    }
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": facts,
        "quick": arguments.quick,
        "seconds": seconds,
        "slots": servers.SLOTS,
        "turns": TURNS,
        "lengths": next(iter(found["chats"].values()))[0]["lengths"]["source"],
        "think": THINK,
        "minutes": arguments.minutes,
        "fractions": arguments.fractions,
        "capacity": found["capacity"],
        "criteria": criteria(by_fraction, OURS) if OURS in by_fraction else [],
        "chats": chats,
        "trace": figures_of(found["trace"]),
        "reports": {part: found[part] for part in ("chats", "trace")},
        "disturbances": comparison.watch.records,
        "failures": comparison.failures,
    }
    name = arguments.name
    labels = {OURS: "lmchat", "llama-server": "llama-server", "vllm": "vLLM CPU"}
    write(result, markdown(result, labels, f"{name}.png"), name)
    plan = next(iter(found["chats"].values()))[0]["plan"]
    lines = {labels[each]: {"plan": plan, "rates": rates} for each, rates in chats.items()}
    plot(lines, str(HERE / "results" / f"{name}.png"))


if __name__ == "__main__":
    sys.exit(main())
