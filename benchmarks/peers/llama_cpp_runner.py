"""Runs llama.cpp's llama-batched-bench, one process per measurement: bf16 or quantized, f16 KV.

Flash attention is on for prefill and off for decode, which is the faster choice of each.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from runner_protocol import Runner, serve

TOOL = Path(os.environ["LLAMA_CPP_BIN"]) / "llama-batched-bench"
WEIGHTS = os.environ["BENCHMARK_WEIGHTS"] or "bf16"
# llama.cpp rounds the context of a sequence up to this many tokens.
ROOM = 256


class LlamaCppRunner(Runner):
    def load(self, model: Path, threads: int, max_batch: int) -> None:
        self.path = model / f"model-{WEIGHTS}.gguf"
        self.threads = threads
        self.bench(prompts=(16,), tokens=1, batch=1, flash="on")

    def versions(self) -> dict[str, str]:
        (source,) = TOOL.parents[2].glob("llama_cpp_python-*")
        return {"llama.cpp of llama-cpp-python": source.name.split("-")[1]}

    def bench(
        self, prompts: tuple[int, ...], tokens: int, batch: int, flash: str
    ) -> dict[str, Any]:
        """Runs the prompt lengths one after the other and returns the record of the last."""
        room = -(-(max(prompts) + tokens + 1) // ROOM) * ROOM
        command = [
            TOOL, "-m", self.path, "-t", self.threads, "-tb", self.threads,
            "-b", 2048, "-ub", 512, "-c", room * batch, "-fa", flash,
            "-npp", ",".join(map(str, prompts)), "-ntg", tokens, "-npl", batch,
            "-pps", "--output-format", "jsonl",
        ]  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        records = [line for line in done.stdout.splitlines() if line.startswith('{"n_kv_max"')]
        if done.returncode or len(records) != len(prompts):
            raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr}")
        record: dict[str, Any] = json.loads(records[-1])
        return record

    def prefill(self, ids: list[int]) -> float:
        # The tool samples the ids itself. The first, shorter prompt warms up its buffers.
        return float(self.bench((512, len(ids)), 1, 1, "on")["t_pp"])

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        # -pps prefills one prompt and gives each row its own copy of that KV.
        record = self.bench((len(prompts[0]),), steps, len(prompts), "off")
        return steps * len(prompts), float(record["t_tg"])

    def turn(self, history: list[int], new: list[int]) -> float:
        command = [
            TOOL.with_name("llama-bench"), "-m", self.path, "-t", self.threads, "-fa", "on",
            "-d", len(history), "-p", len(new), "-n", 0, "-r", 1, "-o", "json",
        ]  # fmt: skip
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with {done.returncode}: {done.stderr}")
        return float(json.loads(done.stdout)[0]["avg_ns"]) * 1e-9


if __name__ == "__main__":
    serve(LlamaCppRunner())
