"""Limits of figures: bars that were set for an H200, and floors of this GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A limit of figures of a model that have the fields of `fits`.

    `higher` is true if higher figures are better. `bound` is the ceiling that scales the bar on
    other GPUs than an H200; "" for a ratio.
    """

    name: str
    model: str
    fits: dict[str, Any]
    field: str
    enough: float
    good: float
    higher: bool = False
    bound: str = ""


COPY, BF16 = "copy_bytes_per_s", "bf16_flop_per_s"
# Ceilings of the H200 that the bars were set for.
H200 = {COPY: 4.3e12, BF16: 8.2e14}
BARS = (
    Bar("TPOT, batch 1, context 512", "llama-3-8b",
        {"figure": "decode", "batch": 1, "context": 512, "deterministic": False},
        "ms", 5.8, 4.6, bound=COPY),
    Bar("TPOT, batch 1, context 512", "llama-3.2-1b",
        {"figure": "decode", "batch": 1, "context": 512, "deterministic": False},
        "ms", 1.0, 0.85, bound=COPY),
    Bar("prefill of 2,048", "llama-3-8b",
        {"figure": "prefill", "tokens": 2048}, "ms", 70, 60, bound=BF16),
    Bar("64 new tokens on 8,192 cached", "llama-3-8b",
        {"figure": "turn", "how": "cached"}, "ms", 12, 10, bound=COPY),
    Bar("batch 64, context 512", "llama-3-8b",
        {"figure": "decode", "batch": 64, "context": 512, "deterministic": False},
        "tokens_per_s", 8500, 8500, higher=True, bound=COPY),
)  # fmt: skip
ATTENTION = Bar(
    "decode attention, batch 32, context 4,096, 32/8 heads", "",
    {"batch": 32, "keys": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "queries": 1},
    "of_bytes", 0.60, 0.75, higher=True,
)  # fmt: skip
# Fields that are equal in two comparable figures.
SAME = (
    "figure", "tokens", "batch", "context", "deterministic", "how", "history", "new", "requests",
    "prompt", "reply",
)  # fmt: skip
TOGETHER = 24.0  # times the rate of transformers with one request after the other
DETERMINISTIC = 1.3  # times the default's decode time, at most


def verdict(bar: Bar, value: float) -> str:
    """Returns "good", "pass" or "miss"."""

    def reaches(limit: float) -> bool:
        return value >= limit if bar.higher else value <= limit

    return "good" if reaches(bar.good) else "pass" if reaches(bar.enough) else "miss"


def judge(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Judges every bar whose figure was measured; `results` by phase."""
    judged = []
    for bar in BARS:
        here, scale = scaled(bar, results)
        found = results.get(f"end_to_end:{bar.model}", {})
        for figure in found.get("figures", []):
            if bar.field in figure and bar.fits.items() <= figure.items():
                line = _line(f"{bar.model}: {bar.name}", here, figure[bar.field])
                judged.append(line | ({"scale": scale} if scale != 1 else {}))
    for figure in results.get("speed", {}).get("figures", []):
        fits = ATTENTION.fits.items() <= figure["dims"].items()
        if figure["op"] == "attention_decode" and fits and ATTENTION.field in figure:
            judged.append(_line(ATTENTION.name, ATTENTION, figure[ATTENTION.field]))
    for phase, found in results.items():
        if phase.startswith("end_to_end:"):
            judged += deterministic_ratios(phase.partition(":")[2], found.get("figures", []))
    return judged


def scaled(bar: Bar, results: dict[str, dict[str, Any]]) -> tuple[Bar, float]:
    """Returns the bar on this GPU and its factor: 1 on an H200, else the ratio of the ceilings."""
    name = str(results.get("environment", {}).get("gpu", {}).get("name", ""))
    limit = results.get("ceilings", {}).get("limits", {}).get(bar.bound)
    if "H200" in name or not limit:
        return bar, 1.0
    scale = limit / H200[bar.bound] if bar.higher else H200[bar.bound] / limit
    return replace(bar, enough=bar.enough * scale, good=bar.good * scale), scale


def deterministic_ratios(model: str, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judges decoding with `deterministic=True` against the default."""
    bar = Bar("", model, {}, "", DETERMINISTIC, DETERMINISTIC)
    default = {
        (f["batch"], f["context"]): f["ms"]
        for f in figures
        if f["figure"] == "decode" and not f["deterministic"] and f.get("ms")
    }
    return [
        _line(
            f"{model}: deterministic decode over the default, batch {f['batch']}, "
            f"context {f['context']}",
            bar,
            f["ms"] / default[f["batch"], f["context"]],
        )
        for f in figures
        if f["figure"] == "decode"
        and f["deterministic"]
        and f.get("ms")
        and (f["batch"], f["context"]) in default
    ]


def against_peers(ours: dict[str, Any], peers: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the speed-up of ours in each figure that both phases have."""
    lines = []
    for figure in peers.get("figures", []):
        about = {name: figure.get(name) for name in SAME}
        for own in ours.get("figures", []):
            if {name: own.get(name) for name in SAME} != about:
                continue
            if not own.get("ms") or not figure.get("ms"):
                continue
            least = TOGETHER if figure["figure"] == "together" else 1.0
            bar = Bar("", "", {}, "", least, least, higher=True)
            text = " ".join(str(value) for value in about.values() if value not in (None, False))
            lines.append(_line(f"{text}: times transformers' speed", bar, figure["ms"] / own["ms"]))
    return lines


def add_floors(results: dict[str, dict[str, Any]]) -> None:
    """Adds to figures of decode and prefill the time of their bytes or FLOPs at the ceilings.

    `of_floor` is the share of that time in the figure.
    """
    limits = results.get("ceilings", {}).get("limits", {})
    for found in results.values():
        for figure in found.get("figures", []):
            for work, limit in (("bytes", COPY), ("flops", BF16)):
                if (
                    "figure" in figure
                    and figure.get(work)
                    and figure.get("ms")
                    and limits.get(limit)
                ):
                    figure["floor_ms"] = figure[work] / limits[limit] * 1e3
                    figure["of_floor"] = figure["floor_ms"] / figure["ms"]


def _line(name: str, bar: Bar, value: float) -> dict[str, Any]:
    return {
        "bar": name,
        "value": value,
        "pass": bar.enough,
        "good": bar.good,
        "verdict": verdict(bar, value),
    }
