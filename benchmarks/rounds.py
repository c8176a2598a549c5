"""Measures runtimes in rounds: each has its own process, and one works at a time."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from disturbance import CALIBRATION_SECONDS, Watch
from install_peers import DEFAULT_DIR
from peer_process import Peer, PeerError, PeerProcess
from shapes import Shape

import turbomind
from turbomind import _C


class Rounds:
    """The runtimes of one model. As a context manager it ends their processes."""

    def __init__(self, root: Path, cpus: list[int], shape: Shape) -> None:
        self.root = root
        self.cpus = cpus
        self.shape = shape
        self.peers: dict[str, PeerProcess] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: dict[str, str] = {}
        self.random = random.Random(time.time_ns())
        os.sched_setaffinity(0, cpus)  # for the calibration loop; runners bind themselves
        isa = turbomind.available_isas()[-1]
        self.watch = Watch(cpus, lambda: _C.measure_tiles(isa, len(cpus), CALIBRATION_SECONDS))

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *exception: object) -> None:
        for peer in self.peers.values():
            peer.close()

    def guarded(self, name: str, action: Any, *rest: Any) -> None:
        """Runs action(name, ...). A peer that fails is removed and the comparison continues."""
        try:
            action(name, *rest)
        except PeerError as error:
            print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
            self.failures[name] = str(error)
            if name in self.peers:
                self.peers.pop(name).close()

    def start(self, name: str, peer: Peer, max_batch: int) -> None:
        """Starts the process and loads the model."""
        started = time.perf_counter()
        process = PeerProcess(peer, self.root, self.cpus, self.shape.name)
        self.peers[name] = process
        folder = self.root / "models" / self.shape.name
        request = {"op": "load", "model": str(folder), "max_batch": max_batch}
        answer = process.ask({**request, "threads": len(self.cpus)})
        self.versions[name] = answer["versions"]
        self.say(name, f"loaded in {time.perf_counter() - started:.1f} s")

    def measured(
        self, name: str, label: str, request: dict[str, Any], repeatable: bool = True
    ) -> dict[str, Any]:
        """Returns a runner's answer, asked while the machine is quiet (disturbance.py)."""
        peer = self.peers[name]

        def ask() -> dict[str, Any]:
            # A repetition has new tokens: those of the first call may be cached.
            return peer.ask({**request, "seed": self.seed()})

        return self.watch.measure(f"{name} {label}", peer.process.pid, ask, repeatable)  # type: ignore[no-any-return]

    def turned(self, index: int) -> list[str]:
        """Returns the remaining runtimes, rotated by one place per index."""
        names = list(self.peers)
        first = index % max(len(names), 1)
        return names[first:] + names[:first]

    def seed(self) -> int:
        return self.random.getrandbits(48)

    def say(self, name: str, text: str) -> None:
        print(f"[{self.shape.name}] {name}: {text}", file=sys.stderr, flush=True)


def names_of(allowed: Collection[str]) -> Any:
    """Returns an argparse type that accepts a comma-separated list of `allowed` names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(
                    f"unknown name {name!r}; expected some of {', '.join(allowed)}"
                )
        return names

    return parse


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every comparison has."""
    parser.add_argument("--quick", action="store_true", help="one short round: a smoke test")
    parser.add_argument(
        "--cpus",
        type=lambda text: [int(cpu) for cpu in text.split(",")],
        default=sorted(os.sched_getaffinity(0))[:2],
        metavar="N,M",
        help="CPUs that every runtime is bound to, one thread each; default: the first two",
    )
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"default: {DEFAULT_DIR}")
    parser.add_argument("--name", help="of the file in results/; default: date and CPU")
