"""Plots reports of `bench serve`: median TTFT, median TPOT and goodput against the rate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmchat.errors import InvalidRequest

from .serve_bench import FORMAT


def read_reports(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads the reports of --compare: name -> report.

    Args:
        pairs: Texts NAME=FILE.

    Raises:
        InvalidRequest: A text is not of that form, or a file is not a report.
    """
    reports: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, found, path = pair.partition("=")
        if not (name and found and path):
            raise InvalidRequest(f"--compare is {pair!r}, expected NAME=FILE")
        if name in reports:
            raise InvalidRequest(f"--compare names {name!r} twice, expected different names")
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
            if report["format"] != FORMAT or not isinstance(report["rates"], list):
                raise ValueError(f"its format is {report['format']!r}, expected {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"--compare is {pair!r}, expected a file that --save or --json wrote: {error}"
            ) from None
        reports[name] = report
    return reports


def plot(reports: Mapping[str, dict[str, Any]], path: str) -> None:
    """Writes the picture as a PNG, a line per report.

    Args:
        reports: Name -> report.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    plan = next(iter(reports.values()))["plan"]
    for name, report in reports.items():
        rates = [each["rate"] for each in report["rates"]]
        lines = (
            [_median(each["ttft"]) for each in report["rates"]],
            [_median(each["tpot"], 1e3) for each in report["rates"]],
            [each["goodput"] for each in report["rates"]],
        )
        for axes, values in zip(panels, lines, strict=True):
            axes.plot(rates, values, marker="o", markersize=4, label=name)
    titles = ("median TTFT (s)", "median TPOT (ms)", "goodput (output tokens/s)")
    limits = (plan["ttft_limit"], plan["tpot_limit"] * 1e3, None)
    for axes, title, limit in zip(panels, titles, limits, strict=True):
        axes.set(title=title, xlabel="turns per second", xlim=(0, None))
        if limit is not None:
            axes.axhline(limit, color="grey", linewidth=0.7, linestyle="--")
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")  # overload multiplies it
    for axes in panels[1:]:
        axes.set_ylim(0, None)
    panels[0].legend()
    FigureCanvasAgg(figure).print_png(path)


def _median(spread: dict[str, float] | None, scale: float = 1.0) -> float:
    """Returns a median; NaN, which leaves a gap in the line, where nothing finished."""
    return float("nan") if spread is None else spread["median"] * scale
