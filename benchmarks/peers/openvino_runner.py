"""Runs OpenVINO GenAI's continuous-batching pipeline: fp16 weights, its default KV precision."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from runner_protocol import SLACK_TOKENS, Runner, serve, time_steps

CACHE_GIB = 1


class OpenVinoRunner(Runner):
    packages = ("openvino-genai", "openvino")

    def load(self, model: Path, threads: int, max_batch: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = max_batch
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(
            str(model / "openvino"), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.requests = 0

    def submit(self, ids: list[int], max_new_tokens: int) -> genai.GenerationHandle:
        config = genai.GenerationConfig(
            max_new_tokens=max_new_tokens, ignore_eos=True, do_sample=False
        )
        self.requests += 1
        tensor = ov.Tensor(np.array([ids], dtype=np.int64))
        return self.pipeline.add_request(self.requests, tensor, config)

    def prefill(self, ids: list[int]) -> float:
        start = time.perf_counter()
        handle = self.submit(ids, 1)
        while not handle.can_read():
            self.pipeline.step()
        seconds = time.perf_counter() - start
        self.drain()
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        handles = [self.submit(ids, steps + SLACK_TOKENS) for ids in prompts]

        def step() -> dict[int, int]:
            self.pipeline.step()
            return {
                row: sum(len(output.generated_ids) for output in handle.read().values())
                for row, handle in enumerate(handles)
                if handle.can_read()
            }

        result = time_steps(step, len(prompts), steps)
        for handle in handles:
            handle.cancel()
        self.drain()
        return result

    def turn(self, history: list[int], new: list[int]) -> float:
        self.prefill(history)
        return self.prefill(history + new)

    def drain(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


if __name__ == "__main__":
    serve(OpenVinoRunner())
