"""A model with experts beside the limits of its machine: one table in about three minutes.

The shape is Granite-3.1-1B-A400M with dummy weights: 32 experts, of which a token takes 8. A decode
step should move the weights that it uses at nearly the speed of reads, and a prompt should compute
at nearly the FLOP/s of a dense model (the shape of Qwen2.5-0.5B).

    python benchmarks/experts.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from shapes import SHAPES

from lmchat.cli.bench.measure import Bench, Ceilings, cpu_ceilings
from turbomind import _C, Engine

CONTEXT, PREFILL, BATCHES = 512, 512, (1, 4, 16)
DECODE_BAR, PREFILL_BAR = 0.75, 0.6
ROOT = Path(__file__).resolve().parents[1]
GRANITE: dict[str, Any] = json.loads(
    (ROOT / "tests/data/configs/granite-3.1-1b-a400m.json").read_text()
)


def opened(config: dict[str, Any], folder: Path, options: dict[str, Any]) -> Engine:
    """Returns an engine with dummy weights of a config."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return Engine(
        folder, load_format="dummy", cache_memory="1GiB", max_batch_size=max(BATCHES), **options
    )


def used_bytes(bench: Bench, batch: int) -> tuple[float, float]:
    """Returns the bytes of experts that a decode step uses, as counted, and of other weights."""
    info = bench.info
    experts = [slot.bytes for slot in info.slots if ".experts." in slot.name]
    layers = len(info.description.layers)
    ops = bench.profile(batch, CONTEXT, PREFILL)["decode"]
    counted = {op["op"]: op["bytes"] / op["calls"] for op in ops}
    share = info.description.layers[0].experts
    assert share is not None
    others = info.step_weight_bytes() - sum(experts) * share.top_k / share.count
    return layers * (counted["gate_up"] + counted["down"]), others


def decode_table(bench: Bench, repeat: int, steps: int) -> list[str]:
    """Measures decode steps and returns the table's rows."""
    rows = [
        "| batch | ms per step | tokens/s | experts, MB | other weights, MB | of *read* | "
        f"goal {DECODE_BAR:.0%} |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in BATCHES:
        experts, others = used_bytes(bench, batch)
        seconds = bench.decode(batch, CONTEXT, steps, repeat).step_seconds
        share = (experts + others) / seconds / bench.ceilings.read
        rows.append(
            f"| {batch} | {seconds * 1e3:.1f} | {batch / seconds:.1f} | {experts / 1e6:.0f} | "
            f"{others / 1e6:.0f} | {share:.0%} | {_verdict(share, DECODE_BAR)} |"
        )
    return rows


def _verdict(share: float, bar: float) -> str:
    return "reached" if share >= bar else "**missed**"


def report(experts: Bench, dense: Bench, repeat: int, steps: int) -> str:
    """Measures and returns the report in Markdown."""
    limits = experts.ceilings
    flops = [b.prefill(PREFILL, repeat).flops_per_second for b in (experts, dense)]
    share = flops[0] / flops[1]
    return "\n".join(
        [
            f"{limits.name}, {limits.isa}, {limits.threads} threads; read {limits.read / 1e9:.1f} "
            f"GB/s. Granite-3.1-1B-A400M, dummy bfloat16, context {CONTEXT}.",
            "",
            *decode_table(experts, repeat, steps),
            "",
            f"Prefill of {PREFILL} tokens: {flops[0] / 1e9:.0f} GFLOP/s, {share:.0%} of the "
            f"{flops[1] / 1e9:.0f} GFLOP/s of the dense shape of Qwen2.5-0.5B (goal "
            f"{PREFILL_BAR:.0%}: {_verdict(share, PREFILL_BAR)}).",
        ]
    )


def main() -> None:
    """Reads the command line, measures and prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--steps", type=int, default=24, help="timed decode steps of a round")
    given = parser.parse_args()
    options = {"device": "cpu", "threads": given.threads, "isa": given.isa}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        limits: Ceilings = cpu_ceilings(_C.resolve_isa(given.isa), given.threads, 1 << 30)
        with (
            opened(GRANITE, root / "experts", options) as experts,
            opened(SHAPES["qwen2.5-0.5b"].config(), root / "dense", options) as dense,
        ):
            benches = Bench(experts, limits), Bench(dense, limits)
            print(report(*benches, given.repeat, given.steps))


if __name__ == "__main__":
    main()
