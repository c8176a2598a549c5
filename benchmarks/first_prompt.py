#!/usr/bin/env python3
"""Measures the first prompt of a fresh process beside later ones: seconds and steps.

    python benchmarks/first_prompt.py MODEL [--load-format dummy] [--tokens 512] [--processes 10]
    python benchmarks/first_prompt.py MODEL --pages        # with a page folder, as sessions have

Each process opens an engine, computes one prompt of random tokens and then a few others of the same
length. The share is the median speed of later prompts that the first one reaches. With `--pages`
the processes share a folder, so that each begins with what the one before has measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

LATER = 4  # prompts after the first one of each process


def measure(arguments: argparse.Namespace) -> list[tuple[float, int]]:
    """Returns seconds and steps of each prompt, in this process."""
    from turbomind import Engine

    options: dict[str, Any] = {"load_format": arguments.load_format, "device": arguments.device}
    if arguments.pages:
        options["page_folder"] = arguments.pages
    found = []
    with Engine(arguments.model, **options) as engine:
        for seed in range(1 + LATER):
            dice = random.Random(time.time_ns() + seed)
            prompt = [dice.randrange(engine.vocab_size) for _ in range(arguments.tokens)]
            steps, begin = engine.stats().steps, time.perf_counter()
            engine.generate(prompt, max_new_tokens=1)
            found.append((time.perf_counter() - begin, engine.stats().steps - steps))
    return found


def fresh(arguments: argparse.Namespace, folder: str) -> list[tuple[float, int]]:
    """Returns the same of a new process."""
    command = [sys.executable, __file__, arguments.model, "--child"]
    command += ["--load-format", arguments.load_format, "--tokens", str(arguments.tokens)]
    command += ["--device", arguments.device]
    if folder:
        command += ["--pages", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [(seconds, steps) for seconds, steps in json.loads(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder with a model, or a config.json with dummy weights")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--tokens", type=int, default=512, help="per prompt; default: 512")
    parser.add_argument("--processes", type=int, default=10, help="default: 10")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--pages", nargs="?", const="-", default="", help="use a page folder")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            fresh(arguments, folder if arguments.pages else "") for _ in range(arguments.processes)
        ]
    later = [statistics.median(seconds for seconds, _ in run[1:]) for run in runs]
    result = {
        "first_seconds": [run[0][0] for run in runs],
        "first_steps": [run[0][1] for run in runs],
        "later_seconds": later,
        "later_steps": [statistics.median(steps for _, steps in run[1:]) for run in runs],
        "share": statistics.median(
            after / run[0][0] for run, after in zip(runs, later, strict=True)
        ),
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    first = statistics.median(result["first_seconds"])
    print(f"first prompt  {1e3 * first:7.0f} ms  steps {result['first_steps']}")
    print(f"later prompts {1e3 * statistics.median(later):7.0f} ms  steps {result['later_steps']}")
    print(f"the first one reaches {result['share']:.1%} of the speed of later ones (median)")


if __name__ == "__main__":
    main()
