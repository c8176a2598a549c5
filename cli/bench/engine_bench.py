"""Measures prefill and decode of one model against the ceilings of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from turbomind import _C, Engine
from turbomind.config import facts
from turbomind.errors import InvalidRequest
from turbomind.loading.loader import ModelInfo
from turbomind.loading.tile_orders import tile_order
from turbomind.machine import physical_cores

from ..terminal.tables import ReportPrinter, figures
from ..terminal.texts import human_bytes
from .measure import Bench, Ceilings, cpu_ceilings, gpu_ceilings, tail_tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes that `bench engine` measures: batch sizes, contexts and prompts in tokens."""

    batches: list[int]
    contexts: list[int]
    prefills: list[int]
    steps: int
    repeat: int
    products: bool

    def check(self, max_context: int) -> None:
        """Raises InvalidRequest when a sequence would not fit in `max_context` tokens."""
        tails = [c + tail_tokens(max(self.batches, default=1), self.steps) for c in self.contexts]
        longest = max([*self.prefills, *tails], default=0)
        if longest >= max_context:
            raise InvalidRequest(
                f"sequences of {longest} tokens, expected fewer than {max_context}: lower "
                "--context or --prefill, or raise --max-context-tokens or --cache-memory"
            )


def ceilings(
    gpus: Sequence[_C.GpuOptions], isa: str | None, threads: int | None, buffer_bytes: int
) -> Ceilings:
    """Measures the ceilings of the GPUs, or without one of the CPU.

    Args:
        gpus: The GPUs; none: the CPU.
        isa: Instruction set of the CPU; None: the best.
        threads: CPU threads; None: the physical cores.
        buffer_bytes: Size of the streamed buffer.
    """
    if gpus:
        return gpu_ceilings(gpus, buffer_bytes)
    return cpu_ceilings(_C.resolve_isa(isa or "auto"), threads or physical_cores(), buffer_bytes)


def run(
    info: ModelInfo, plan: Plan, options: dict[str, Any], gpus: Sequence[_C.GpuOptions]
) -> dict[str, Any]:
    """Runs all measurements.

    Args:
        info: The model.
        plan: Sizes to measure.
        options: Options of the engine.
        gpus: The GPU of each rank; none: the CPU.

    Returns:
        A JSON-able report; times in seconds, rates per second.
    """
    model = info.description
    # Measured before the engine allocates most of a GPU's memory.
    limits = ceilings(gpus, options.get("isa"), options["threads"], info.step_weight_bytes())
    report: dict[str, Any] = {
        "model": str(info.path),
        "architecture": model.architecture,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "weights": info.weights_text,
        "kv_dtype": info.kv_dtype,
        "cpu": _C.cpu_name(),
        "ceilings": dataclasses.asdict(limits),
    }
    if plan.products:
        report["products"] = bare_products(info, limits, max([*plan.prefills, 1]))
    with Engine(info.path, **options, device=limits.device) as core:
        bench = Bench(core, limits)
        plan.check(core.max_context)
        report["logits_hash"] = bench.logits_hash()
        report["prefill"] = [
            dataclasses.asdict(bench.prefill(tokens, plan.repeat)) for tokens in plan.prefills
        ]
        report["decode"] = [
            dataclasses.asdict(bench.decode(batch, context, plan.steps, plan.repeat))
            for context in plan.contexts
            for batch in plan.batches
        ]
        if plan.batches and plan.contexts and plan.prefills:
            report["ops"] = bench.profile(plan.batches[0], plan.contexts[0], plan.prefills[0])
    return report


def bare_products(info: ModelInfo, limits: Ceilings, m: int) -> list[dict[str, Any]]:
    """Measures each matrix product of the model alone, with `m` rows of input."""
    found = []
    assert limits.isa is not None
    assert limits.threads is not None
    # Of an embedding and a head of one shape the head is the later one.
    formats = {(slot.rows, slot.cols): slot.format for slot in info.slots if slot.linear}
    for product in facts.products(info.description):
        weight_format = formats[product.n, product.k]
        limit = limits.int8 if weight_format.startswith("int") else limits.tiles
        assert limit is not None
        rate = _C.measure_linear(
            limits.isa,
            limits.threads,
            weight_format,
            m,
            product.n,
            product.k,
            0.5,
            order=tile_order(limits.isa),
        )
        found.append(
            {
                **dataclasses.asdict(product),
                "m": m,
                "flops_per_second": rate,
                "of_tiles": rate / limit,
            }
        )
    return found


def show_ceilings(found: Ceilings) -> None:
    """Prints the ceilings."""
    ReportPrinter().print(_ceilings_table(found))


def _ceilings_table(found: Ceilings) -> Table:
    on_cpu = f"{found.isa}, {found.threads} threads"
    rates = {"read": f"{found.read / 1e9:.1f} GB/s"}
    if found.copy is not None:
        rates["copy"] = f"{found.copy / 1e9:.1f} GB/s"
    rates["tiles"] = f"{found.tiles / 1e12:.3f} TFLOP/s"
    if found.int8 is not None:
        rates["int8"] = f"{found.int8 / 1e12:.3f} TOP/s"
    table = figures(found.name if found.isa is None else on_cpu, *rates)
    table.add_row(*rates.values())
    return table


def show(report: dict[str, Any]) -> None:
    """Prints the tables of a report."""
    printer = ReportPrinter()
    printer.print(
        f"{report['model']}: {report['architecture']}, {report['parameters']:,} parameters, "
        f"{report['weights']}, KV {report['kv_dtype']}, logits {report['logits_hash']}"
    )
    printer.print(_ceilings_table(Ceilings(**report["ceilings"])))
    printer.print(_prefill_table(report["prefill"]))
    printer.print(_decode_table(report["decode"]))
    if "products" in report:
        printer.print(_products_table(report["products"]))
    for kind, ops in report.get("ops", {}).items():
        printer.print(_ops_table(kind, ops, report["ceilings"]))


def _prefill_table(rows: list[dict[str, Any]]) -> Table:
    table = figures("prefill", "tokens", "ms", "tok/s", "TFLOP/s", "of tiles")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['flops_per_second'] / 1e12:.3f}",
            f"{row['of_tiles']:.1%}",
        )
    return table


def _decode_table(rows: list[dict[str, Any]]) -> Table:
    names = ("batch", "context", "ms", "tok/s", "bytes", "GB/s", "of read", "weights")
    table = figures("decode", *names)
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["context"]),
            f"{row['step_seconds'] * 1e3:.2f}",
            f"{row['tokens_per_second']:.1f}",
            human_bytes(row["weight_bytes"] + row["kv_bytes"]),
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['of_read']:.1%}",
            f"{row['weights_of_read']:.1%}",
        )
    return table


def _products_table(rows: list[dict[str, Any]]) -> Table:
    table = figures("bare products", "product", "m", "n", "k", "TFLOP/s", "of tiles")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["m"]),
            str(row["n"]),
            str(row["k"]),
            f"{row['flops_per_second'] / 1e12:.3f}",
            f"{row['of_tiles']:.1%}",
        )
    return table


def _ops_table(kind: str, ops: list[dict[str, Any]], limits: dict[str, Any]) -> Table:
    table = figures(f"{kind} by op", "op", "calls", "ms", "share", "of read", "of tiles")
    total = sum(op["seconds"] for op in ops) or 1.0
    for op in ops:
        seconds = op["seconds"] or float("inf")
        table.add_row(
            op["op"],
            str(op["calls"]),
            f"{op['seconds'] * 1e3:.2f}",
            f"{op['seconds'] / total:.1%}",
            f"{op['bytes'] / seconds / limits['read']:.1%}",
            f"{op['flops'] / seconds / limits['tiles']:.1%}",
        )
    return table
