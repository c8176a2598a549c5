"""Runs Hugging Face transformers: eager mode, bf16 weights and KV, its default cache."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from runner_protocol import ChatRunner, Runner, serve
from transformers import AutoModelForCausalLM, DynamicCache


class TransformersRunner(ChatRunner, Runner):
    packages = ("transformers", "torch")

    def load(self, model: Path, threads: int, max_batch: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Runs ids [batch, new] and returns the greedy next ids [batch, 1]."""
        output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1)

    def prefill(self, ids: list[int]) -> float:
        start = time.perf_counter()
        self.forward(torch.tensor([ids]), DynamicCache(config=self.model.config))
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        cache = DynamicCache(config=self.model.config)
        token = self.forward(torch.tensor(prompts[:1]), cache)
        # The other sequences get copies of the first one's KV: the same bytes to read in less time.
        cache.batch_repeat_interleave(len(prompts))
        token = self.forward(token.repeat(len(prompts), 1), cache)
        start = time.perf_counter()
        for _ in range(steps):
            token = self.forward(token, cache)
        return steps * len(prompts), time.perf_counter() - start

    def turn(self, history: list[int], new: list[int]) -> float:
        cache = DynamicCache(config=self.model.config)
        self.forward(torch.tensor([history]), cache)
        start = time.perf_counter()
        self.forward(torch.tensor([new]), cache)
        return time.perf_counter() - start

    def chat_start(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    def chat_turn(self, past: list[int], new: list[int], reply: int) -> tuple[list[int], float]:
        # The last token of the previous reply is not in the cache yet.
        start = time.perf_counter()
        token = self.forward(torch.tensor([past[-1:] + new]), self.cache)
        tokens = [int(token)]
        seconds = time.perf_counter() - start
        while len(tokens) < reply:
            token = self.forward(token, self.cache)
            tokens.append(int(token))
        return tokens, seconds

    def chat_again(self, prompt: list[int]) -> float:
        return self.prefill(prompt)


if __name__ == "__main__":
    serve(TransformersRunner())
