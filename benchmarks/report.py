"""Facts about the machine, and the Markdown report of a comparison."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from disturbance import lines_of
from peer_process import OURS, PEERS
from shapes import SHAPES

ISA_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8",
)  # fmt: skip
HEADS = {
    "prefill_512": "prefill 512 tok/s",
    "prefill_2048": "prefill 2048 tok/s",
    "decode_b1": "decode b1 tok/s",
    "decode_b8": "b8",
    "decode_b16": "b16",
    "turn_kept_ms": "turn 2 TTFT ms, kept",
    "turn_again_ms": "prefilled again",
}


def machine_facts(cpus: list[int]) -> dict[str, Any]:
    """Returns facts about the machine: CPU, ISA, memory, load, versions."""
    text = Path("/proc/cpuinfo").read_text()
    pairs = (line.partition(":") for line in text.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", "").split()
    memory = int(Path("/proc/meminfo").read_text().split()[1])
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cpus_online": os.cpu_count(),
        "cpus_used": cpus,
        "memory_gib": round(memory / 2**20, 1),
        "huge_pages": pages.read_text().strip() if pages.exists() else "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "commit": commit(),
    }


def commit() -> str:
    """Returns the commit, with + for local changes, or "unknown" outside a repository."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=here, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def named(result: dict[str, Any]) -> str:
    """Returns the default name of the result files: date and CPU."""
    cpu = result["machine"]["cpu"].lower()
    slug = "".join(c if c.isalnum() else "-" for c in cpu).strip("-")
    return f"{result['date'][:10]}-{slug}"


def write(result: dict[str, Any], text: str, name: str) -> None:
    """Prints the report and writes it and the figures to results/."""
    print(text)
    folder = Path(__file__).resolve().parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print(f"\nWritten: {path} and {path.with_suffix('.md').name}", file=sys.stderr)


def header(title: str, result: dict[str, Any], method: str | None = None) -> list[str]:
    """Returns the head of a report: date, machine and method, by default alternating rounds."""
    machine = result["machine"]
    if method is None:
        method = f"Medians of {result['rounds']} alternating rounds; lowest to highest below each."
    lines = [
        f"# {title}",
        "",
        f"{result['date']}, commit {machine['commit']}. {machine['cpu']} (family/model "
        f"{machine['cpu_family_model']}; {', '.join(machine['isa']) or 'no vector ISA found'}), "
        f"CPUs {', '.join(map(str, machine['cpus_used']))} of {machine['cpus_online']}, "
        f"{machine['memory_gib']} GiB; load {machine['load_at_start']} at the start. "
        f"{method} It took {result['seconds'] / 60:.0f} minutes.",
    ]
    if result["quick"]:
        lines += ["", "**A quick run: too short and too few samples to compare anything.**"]
    return lines


def lower_is_better(key: str) -> bool:
    return key.endswith("_ms")


def markdown(result: dict[str, Any]) -> str:
    """Returns the whole report."""
    lines = header("Ours beside the peers", result)
    for name, model in result["models"].items():
        lines += ["", f"## {name} shape", "", *table(model)]
        if OURS in model["peers"] and "ceilings" in model:
            lines += ["", *fractions(name, model)]
        lines += ["", *lines_of(model["disturbances"])]
        for peer, reason in model["failures"].items():
            lines += ["", f"{PEERS[peer].label} failed: {reason.splitlines()[0]}"]
    lines += ["", versions_line(result)]
    return "\n".join(lines) + "\n"


def versions_line(result: dict[str, Any]) -> str:
    """Returns one line with the versions of all runtimes."""
    versions: dict[str, str] = {}
    for model in result["models"].values():
        for peer in model["peers"].values():
            versions |= peer["versions"]
    return "Versions: " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())) + "."


def table(model: dict[str, Any]) -> list[str]:
    """Returns a table of runtimes, ours first, best figures bold, and a row of our best / best
    peer."""
    columns = model["columns"]
    medians = {
        peer: {key: figure["median"] for key, figure in facts["figures"].items()}
        for peer, facts in model["peers"].items()
    }
    order = [name for name in PEERS if name in medians]
    lines = [
        "| runtime | " + " | ".join(HEADS[key] for key in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    best = {key: best_of(key, [medians[name] for name in order]) for key in columns}
    for name in order:
        cells = []
        for key in columns:
            figure = model["peers"][name]["figures"].get(key)
            if figure is None:
                cells.append("-")
                continue
            text = number(figure["median"])
            if figure["median"] == best[key]:
                text = f"**{text}**"
            cells.append(f"{text}<br>{number(figure['min'])} - {number(figure['max'])}")
        lines.append(f"| {PEERS[name].label} | " + " | ".join(cells) + " |")
    if OURS in medians and len(order) > 1:
        lines += multiples(columns, medians)
    ours = [medians[name] for name in order if PEERS[name].runtime == OURS]
    others = [medians[name] for name in order if PEERS[name].runtime != OURS]
    if ours and others:
        cells = []
        for key in columns:
            peer, own = best_of(key, others), best_of(key, ours)
            if peer is None or own is None:
                cells.append("-")
            else:
                cells.append(f"{peer / own if lower_is_better(key) else own / peer:.2f}x")
        label = "ours" if len(ours) == 1 else "our best"
        lines.append(f"| {label} against the best peer | " + " | ".join(cells) + " |")
    return lines


def multiples(columns: list[str], medians: dict[str, dict[str, float]]) -> list[str]:
    """Returns a row for each quantized format of ours: its figures over those of our bf16."""
    lines = []
    for name, figures in medians.items():
        if PEERS[name].runtime != OURS or name == OURS:
            continue
        cells = []
        for key in columns:
            part = figures.get(key, 0.0) / medians[OURS][key] if key in medians[OURS] else 0.0
            part = 1 / part if part and lower_is_better(key) else part
            cells.append(f"{part:.2f}x" if part else "-")
        lines.append(f"| {PEERS[name].weights} against our bf16 | " + " | ".join(cells) + " |")
    return lines


def best_of(key: str, rows: list[dict[str, float]]) -> float | None:
    values = [row[key] for row in rows if key in row]
    if not values:
        return None
    return min(values) if lower_is_better(key) else max(values)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def fractions(name: str, model: dict[str, Any]) -> list[str]:
    """Returns our figures as fractions of the machine's ceilings, measured in the same rounds."""
    shape = SHAPES[name]
    ceilings = model["ceilings"]
    own = {key: figure["median"] for key, figure in model["peers"][OURS]["figures"].items()}
    read, tiles = ceilings["read"], ceilings["tiles"]
    lines = [
        f"Ceilings on these threads, best round: *read* {read / 1e9:.1f} GB/s, "
        f"*tiles* {tiles / 1e12:.2f} TFLOP/s.",
        "",
        "| ours | figure | of the ceiling |",
        "|---|---|---|",
    ]

    def row(what: str, figure: str, part: str) -> None:
        lines.append(f"| {what} | {figure} | {part} |")

    if "decode_b1" in own:
        moved = own["decode_b1"] * shape.decode_weight_bytes()
        part = f"{moved / read:.0%} of the best read"
        if "decode_b1_of_read" in ceilings:
            parts = sorted(ceilings["decode_b1_of_read"])
            part = (
                f"{statistics.median(parts):.0%} of read beside it "
                f"({parts[0]:.0%} - {parts[-1]:.0%}); {part}"
            )
        row("decode b1, weights", f"{moved / 1e9:.1f} GB/s", part)
        for key in ("decode_b8", "decode_b16"):
            if key in own:
                factor = own[key] / own["decode_b1"]
                row(key.replace("_", " "), f"{factor:.1f} times b1", "-")
    for tokens in (512, 2048):
        if f"prefill_{tokens}" in own:
            speed = own[f"prefill_{tokens}"] * shape.prefill_flops(tokens) / tokens
            row(f"prefill {tokens}", f"{speed / 1e12:.2f} TFLOP/s", f"{speed / tiles:.0%} of tiles")
    if "prefill_512" in own and "prefill_2048" in own:
        slower = own["prefill_512"] / own["prefill_2048"] - 1.0
        row("prefill 2048, per token", f"{slower:+.0%} time against 512", "-")
    for product, speed in ceilings["products"].items():
        n, k = shape.layer_products()[product]
        row(
            f"bare product {product}, 512 x {n} x {k}",
            f"{speed / 1e12:.2f} TFLOP/s",
            f"{speed / tiles:.0%} of tiles",
        )
    return lines
