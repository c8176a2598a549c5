"""Prints the part of `bench turns` about the tiers of the KV cache."""

from __future__ import annotations

from typing import Any

from ..terminal.tables import ReportPrinter, figures
from ..terminal.texts import human_bytes
from .disk import disk_note
from .kv_tiers_bench import OF_BANDWIDTH, PLACES


def show(printer: ReportPrinter, report: dict[str, Any]) -> None:
    """Prints the section of a report."""
    printer.print(
        f"a turn of {report['new_tokens']} tokens after {report['context']:,}, by the place of "
        f"their KV cache; medians of {report['rounds']}"
    )
    names = (
        "KV cache",
        "TTFT",
        "predicted",
        "error",
        "computed",
        "loaded",
        "of bound",
        "recompute",
    )
    table = figures("TTFT in ms; tokens", *names)
    table.columns[0].justify = "left"
    for row in report["rows"]:
        name = row["from"]
        over, again = report["over_bound"].get(name), report["again_over"].get(name)
        table.add_row(
            PLACES[name],
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['predicted_seconds'] * 1e3:.1f}",
            f"{row['prediction_error']:.0%}",
            f"{row['computed_tokens']:,}",
            f"{row['loaded_tokens']:,}",
            f"{over['median']:.2f}" if over else "",
            f"{again['median']:.1f} x" if again else "",
        )
    printer.print(table)
    for line in notes(report):
        printer.print(line)


def notes(report: dict[str, Any]) -> list[str]:
    """Returns notes on the figures of the table."""
    dropped = "verified by mincore" if report["dropped_verified"] else "NOT VERIFIED"
    tried = report["predictions"]
    lines = [
        f"KV {human_bytes(report['kv_bytes'])}; disk {disk_note(report)}, "
        f"{report['read_bytes_per_second'] / 1e6:,.0f} MB/s with reads of 1 MiB",
        f"bound: KV / {OF_BANDWIDTH:.0%} of that + TTFT on the device = "
        f"{report['bound_seconds'] * 1e3:.1f} ms",
        f"files dropped from the page cache: {dropped}; warm files: {report['warm_share']:.0%} "
        f"of them cached; opening the engine took {report['open_seconds']:.2f} s",
    ]
    if tried:
        lines.append(
            f"predicted TTFT over {tried['resumes']} resumes of {tried['shortest_prompt']:,} to "
            f"{tried['longest_prompt']:,} tokens: median error {tried['median_error']:.0%}"
        )
    return lines
