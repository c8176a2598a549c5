"""Prints the report of `bench pressure` and plots its times to first token."""

from __future__ import annotations

from typing import Any

from ..terminal.tables import ReportPrinter, figures
from ..terminal.texts import human_bytes
from .disk import disk_note
from .memory_pressure_mode import TIERS


def show(report: dict[str, Any]) -> None:
    """Prints the table of a report."""
    printer = ReportPrinter()
    for line in headline(report):
        printer.print(line)
    tiers = [name for name in TIERS if name in report["plan"]["tiers"]]
    names = ("mode", "turns", "mean", "P50", "P90", "max", "recomputed", "device", *tiers)
    table = figures("TTFT in ms; recomputed tokens; hit rates by tier", *names)
    table.columns[0].justify = "left"
    for name, mode in report["modes"].items():
        ttft, hits = mode["ttft"], mode["hit_rates"]
        table.add_row(
            name,
            str(mode["turns"]),
            *(f"{ttft[key] * 1e3:,.0f}" for key in ("mean", "p50", "p90", "max")),
            f"{mode['again_tokens']:,}",
            *(f"{hits[key]:.0%}" if key in hits else "" for key in ("device", *tiers)),
        )
    printer.print(table)
    for line in notes(report):
        printer.print(line)


def notes(report: dict[str, Any]) -> list[str]:
    """Returns the descriptions of the modes and their comparison, line by line."""
    lines = []
    for name, mode in report["modes"].items():
        lines.append(
            f"{name}: {mode['what']}; {mode['warm_up_turns_per_second']:.2f} turns per second in "
            "the warm-up"
        )
        if mode["unfinished"]:
            lines.append(
                f"  {mode['unfinished']} of its turns had no token at the end; each counts "
                f"with its "
                "waiting time"
            )
    for name, share in report["against"].items():
        figure, _, other = name.partition("_below_")
        way = "below" if share >= 0 else "above"
        lines.append(f"tiers: {figure} TTFT {abs(share):.0%} {way} {other}")
    return lines


def headline(report: dict[str, Any]) -> list[str]:
    """Returns the description of the load, line by line."""
    plan = report["plan"]
    return [
        f"{report['model']}: {report['architecture']}, {report['dtype']}, KV {report['kv_dtype']}",
        f"{report['sessions']} sessions of {report['history_tokens']:,} tokens "
        f"({human_bytes(report['kv_bytes'])}), the longest {report['longest_history']:,}, on a "
        f"device with room for {report['device_tokens']:,}: {report['oversubscribed']:.1f} times",
        f"lengths and arrivals: {report['source']}; {report['rate']:.2f} turns per second for "
        f"{report['window_seconds']:.0f} s, replies cut at {plan['reply']} tokens; lower tiers: "
        f"{', '.join(plan['tiers'])} on {disk_note(report)}",
    ]


def plot(report: dict[str, Any], path: str) -> None:
    """Writes the distribution of the TTFT, a line per mode, as a PNG.

    Args:
        report: The report.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, mode in report["modes"].items():
        times = sorted(each["seconds"] for each in mode["samples"])
        shares = [(index + 1) / len(times) for index in range(len(times))]
        axes.step(times, shares, where="post", label=f"{name} (P90 {mode['ttft']['p90']:.2g} s)")
    axes.axhline(0.9, color="grey", linewidth=0.5)
    axes.set(
        xscale="log",
        ylim=(0, 1),
        xlabel="seconds to the first token",
        ylabel="share of turns",
        title=f"{report['sessions']} sessions, {report['oversubscribed']:.1f} times the memory, "
        f"{report['rate']:.2g} turns per second",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)
