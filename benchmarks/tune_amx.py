#!/usr/bin/env python3
"""Measures in which order this machine's AMX units multiply fastest, and stores it for engines.

    python benchmarks/tune_amx.py [--seconds 0.5] [--rounds 3] [--threads N] [--table FILE]

Measures every chunk of K, stationary operand and kind of load on the products of a prompt, then the
epilogues with the fastest order. That takes about 5 minutes. The result goes under the processor's
name into turbomind/loading/tile_orders.json, which engines read when they load a model; with
--table it goes elsewhere. Every order gives the same bits. Nothing else should run meanwhile.

`--emulated` computes tiny products with emulated tiles, to try the command on a machine without
AMX. It stores nothing unless --table names a file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbomind import _C
from turbomind.loading.tile_orders import FIELDS, TABLE, read_table
from turbomind.machine import physical_cores

# [m, n, k] of 512 rows with the projections of a 0.5B model (qkv, o, gate and up, down) and with
# gate and up of a 1B model.
SHAPES = [(512, 1152, 896), (512, 896, 896), (512, 9728, 896), (512, 896, 4864), (512, 16384, 2048)]
GATED = [(512, 9728, 896), (512, 16384, 2048)]
TINY = [(33, 64, 96), (64, 96, 300)]
CHUNKS = (8, 10, 12, 16)
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Order:
    """One order of the kernel; see cpp/core/tile_order.h."""

    chunk_k_blocks: int
    stays: str
    stream: bool

    @property
    def core(self) -> _C.TileOrder:
        return _C.TileOrder(self.chunk_k_blocks, self.stays, self.stream)

    def __str__(self) -> str:
        loads = "tileloaddt1" if self.stream else "tileloadd"
        moving = "x" if self.stays == "weights" else "w"
        return f"chunk {self.chunk_k_blocks:2d}, {self.stays} stay, {loads} for {moving}"


ORDERS = [
    Order(chunk, stays, stream)
    for chunk, stays, stream in itertools.product(CHUNKS, ("weights", "rows"), (False, True))
]


def caches() -> dict[str, dict[str, str]]:
    """Returns size and ways of the first CPU's caches, as the system reports them."""
    found = {}
    for index in sorted((CPUS / "cpu0/cache").glob("index*")):
        facts = {
            name: (index / name).read_text().strip()
            for name in ("level", "type", "size", "ways_of_associativity")
            if (index / name).exists()
        }
        name = f"L{facts.pop('level', '?')} {facts.pop('type', index.name)}"
        found[name] = facts
    return found


def cores(threads: int) -> dict[str, Any]:
    """Returns the CPUs of this process, and whether some are siblings of one core."""
    cpus = sorted(os.sched_getaffinity(0))
    physical = physical_cores()
    return {"threads": threads, "cpus": len(cpus), "siblings": physical < len(cpus)}


class Tuner:
    """Measures products on one instruction set."""

    def __init__(self, isa: str, threads: int, seconds: float, rounds: int) -> None:
        self.isa, self.threads, self.seconds, self.rounds = isa, threads, seconds, rounds

    def rate(self, shape: tuple[int, int, int], order: Order, epilogue: str = "store") -> float:
        """Returns FLOP/s, at best of the calls within the seconds of one figure."""
        return _C.measure_linear(
            self.isa, self.threads, "bfloat16", *shape, self.seconds, epilogue, order.core
        )

    def rates(self, shapes: list[tuple[int, int, int]]) -> dict[Order, list[float]]:
        """Returns the median FLOP/s of each order by shape. Rounds alternate between the orders, so
        that drift of the machine's speed meets all of them."""
        samples: dict[Order, list[list[float]]] = {o: [[] for _ in shapes] for o in ORDERS}
        for _ in range(self.rounds):
            for i, shape in enumerate(shapes):
                for order in ORDERS:
                    samples[order][i].append(self.rate(shape, order))
        return {o: [statistics.median(s) for s in by_shape] for o, by_shape in samples.items()}

    def epilogues(self, shapes: list[tuple[int, int, int]], order: Order) -> list[dict[str, Any]]:
        """Returns the FLOP/s of each shape without an activation and with `silu_mul`."""
        return [
            {
                "shape": list(shape),
                **{
                    epilogue: statistics.median(
                        self.rate(shape, order, epilogue) for _ in range(self.rounds)
                    )
                    for epilogue in ("store", "silu_mul")
                },
            }
            for shape in shapes
        ]


def fastest(rates: dict[Order, list[float]]) -> Order:
    """Returns the order with the highest geometric mean over the shapes."""
    return max(rates, key=lambda order: math.fsum(math.log(rate) for rate in rates[order]))


def instruction_set(emulated: bool) -> str:
    """Returns the set to measure; ends the process where there is none."""
    if emulated:
        return str(_C.resolve_isa("amx_emulated"))
    here = _C.available_isas()
    if "amx" not in here:
        why = _C.amx_hindrance() or "the processor has none"
        sys.exit(
            f"tune_amx: no AMX on {_C.cpu_name()} ({why}); instruction sets here: "
            f"{', '.join(here)}. --emulated tries the command with tiny products"
        )
    return "amx"


def show(
    shapes: list[tuple[int, int, int]],
    rates: dict[Order, list[float]],
    epilogues: list[dict[str, Any]],
    tiles: float,
) -> None:
    """Prints the rates in GFLOP/s and their share of the tile units' rate."""
    best = fastest(rates)
    print(f"tiles {tiles / 1e9:.1f} GFLOP/s; GFLOP/s (% of tiles) by m x n x k:")
    print(" " * 48 + "".join(f"{'x'.join(map(str, shape)):>22}" for shape in shapes))
    for order, by_shape in rates.items():
        cells = (f"{rate / 1e9:12.1f} ({100 * rate / tiles:5.1f} %)" for rate in by_shape)
        mark = "*" if order == best else " "
        print(f"{mark} {order!s:46}" + "".join(f"{cell:>22}" for cell in cells))
    for entry in epilogues:
        store, silu = entry["store"], entry["silu_mul"]
        size = "x".join(map(str, entry["shape"]))
        print(f"{size}: silu_mul {100 * (store / silu - 1):+.1f} % time over store")


def save(table: Path, entry: dict[str, Any]) -> None:
    """Replaces this processor's entry of the table."""
    entries = read_table(table) if table.exists() else {}
    entries[_C.cpu_name()] = entry
    text = json.dumps({"processors": dict(sorted(entries.items()))}, indent=1) + "\n"
    partial = table.with_name(table.name + ".partial")
    partial.write_text(text)
    partial.replace(table)
    print(f"stored under {_C.cpu_name()!r} in {table}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="default: the physical cores")
    parser.add_argument("--table", type=Path, default=None, help=f"default: {TABLE.name}")
    parser.add_argument("--emulated", action="store_true", help="tiny products, emulated tiles")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: got {options.rounds}, expected at least 1")
    return options


def main() -> None:
    options = arguments()
    isa = instruction_set(options.emulated)
    threads = options.threads or physical_cores()
    shapes, gated = (TINY, TINY) if options.emulated else (SHAPES, GATED)
    tuner = Tuner(isa, threads, options.seconds, options.rounds)
    tiles = _C.measure_tiles(isa, threads, options.seconds)
    rates = tuner.rates(shapes)
    best = fastest(rates)
    epilogues = tuner.epilogues(gated, best)
    show(shapes, rates, epilogues, tiles)
    entry = {
        **{field: getattr(best, field) for field in FIELDS},
        "measured": {
            "isa": isa,
            "seconds": options.seconds,
            "rounds": options.rounds,
            "cores": cores(threads),
            "caches": caches(),
            "tiles_flops": tiles,
            "shapes": [list(shape) for shape in shapes],
            "flops": {str(order): by_shape for order, by_shape in rates.items()},
            "epilogues": epilogues,
        },
    }
    table = options.table or (None if options.emulated else TABLE)
    if table is not None:
        save(table, entry)


if __name__ == "__main__":
    main()
