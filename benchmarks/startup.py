#!/usr/bin/env python3
"""Measures start-up: import time, and the first token of `lmchat chat -p`.

    python benchmarks/startup.py MODEL [--runs 5] [--json]

Medians of several runs, each in a new process, after one that warms the page cache. A small model
makes our own share visible. The packages that take longest to import are listed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

TIMED = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)")
SHOWN = 12
HEAVY = ("torch", "transformers", "gradio", "matplotlib", "prompt_toolkit", "huggingface_hub")


def seconds_of(statement: str) -> float:
    """Returns the seconds of a statement in a new interpreter, start-up excluded."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def question(model: str, *flags: str) -> list[str]:
    command = [sys.executable, *flags, "-m", "lmchat.cli", "chat", model, "-p", "Once upon a time"]
    return [*command, "--max-new-tokens", "16", "--temperature", "0", "--device", "cpu"]


def first_token_seconds(model: str) -> float:
    """Returns the seconds from the start of the process to the first byte of the answer."""
    begin = time.perf_counter()
    with subprocess.Popen(question(model), stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"lmchat chat ended with {process.returncode} and no answer")
    return seconds


def median(runs: int, measure: Callable[[], float]) -> dict[str, float]:
    measure()
    samples = [measure() for _ in range(runs)]
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def import_seconds(model: str) -> Counter[str]:
    """Returns the import seconds per top-level package while a question is answered."""
    done = subprocess.run(
        question(model, "-X", "importtime"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    found: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if match := LINE.match(line):
            found[match[2].partition(".")[0]] += int(match[1]) / 1e6  # type: ignore[assignment]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder with a small model")
    parser.add_argument("--runs", type=int, default=5, help="default: 5")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    imports = import_seconds(arguments.model)
    result = {
        "import lmchat": median(arguments.runs, lambda: seconds_of("import lmchat")),
        "import lmchat, then lmchat.ChatEngine": median(
            arguments.runs, lambda: seconds_of("import lmchat; lmchat.ChatEngine")
        ),
        "lmchat chat -p, first token": median(
            arguments.runs, lambda: first_token_seconds(arguments.model)
        ),
    }
    heavy = [name for name in HEAVY if name in imports]
    if arguments.json:
        print(json.dumps({"seconds": result, "imports": imports, "heavy": heavy}, indent=2))
        return
    for what, times in result.items():
        print(f"{what:40} {times['median']:.3f} s  ({times['min']:.3f} - {times['max']:.3f})")
    print(f"\nimporting on the way there: {sum(imports.values()):.3f} s, of it")
    for name, seconds in imports.most_common(SHOWN):
        print(f"  {name:38} {seconds:.3f} s")
    print(f"heavy packages among them: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
