"""Runs lmchat through `turbomind.Engine`: bf16 or quantized weights, bf16 KV. Also measures the
ceilings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from runner_protocol import MAX_CONTEXT, SLACK_TOKENS, ChatRunner, Runner, serve, time_steps

import turbomind
from turbomind import _C
from turbomind.loading.tile_orders import tile_order

CEILING_SECONDS = 0.5
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class LmchatRunner(ChatRunner, Runner):
    def load(self, model: Path, threads: int, max_batch: int) -> None:
        self.engine = turbomind.Engine(
            model,
            device="cpu",
            dtype="bfloat16",
            quantize=os.environ["BENCHMARK_WEIGHTS"] or None,
            kv_dtype="bfloat16",
            threads=threads,
            max_batch_size=max_batch,
            max_context_tokens=MAX_CONTEXT,
            cache_memory="1GiB",
        )
        self.chat: turbomind.Handle | None = None

    def versions(self) -> dict[str, str]:
        return {"lmchat": turbomind.__version__, "isa": self.engine.isa}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "ceilings":
            return self.ceilings(request["buffer_bytes"], request["products"])
        return super().call(request)

    def prefill(self, ids: list[int]) -> float:
        start = time.perf_counter()
        self.engine.generate(ids, max_new_tokens=1, **GREEDY)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        streams = [
            self.engine.stream(ids, max_new_tokens=steps + SLACK_TOKENS, **GREEDY)
            for ids in prompts
        ]
        requests = [stream.request for stream in streams]
        totals = [0] * len(prompts)

        def step() -> dict[int, int]:
            """Waits for the slowest sequence and reads the new tokens of all."""
            requests[totals.index(min(totals))].wait(0.1)
            new = {}
            for row, request in enumerate(requests):
                events = request.drain()
                for event in events:
                    if event.finish_reason is not None:
                        raise RuntimeError(
                            f"row {row} ended early: {event.finish_reason} {event.error}"
                        )
                new[row] = sum(len(event.token_ids) for event in events)
                totals[row] += new[row]
            return new

        try:
            return time_steps(step, len(prompts), steps)
        finally:
            for stream in streams:
                stream.cancel()
            for stream in streams:
                stream.close()

    def turn(self, history: list[int], new: list[int]) -> float:
        with self.engine.open() as handle:
            handle.append(history)
            handle.generate(max_new_tokens=1, **GREEDY).result()
            handle.append(new)
            start = time.perf_counter()
            handle.generate(max_new_tokens=1, **GREEDY).result()
            return time.perf_counter() - start

    def chat_start(self) -> None:
        if self.chat is not None:
            self.chat.close()
        self.engine.evict()
        self.chat = self.engine.open()

    def chat_turn(self, past: list[int], new: list[int], reply: int) -> tuple[list[int], float]:
        assert self.chat is not None
        start = time.perf_counter()
        self.chat.append(new)
        tokens: list[int] = []
        seconds = 0.0
        for event in self.chat.generate(max_new_tokens=reply, **GREEDY):
            if event.error is not None:
                raise event.error
            if event.token_ids and not tokens:
                seconds = time.perf_counter() - start
            tokens += event.token_ids
        return tokens, seconds

    def chat_again(self, prompt: list[int]) -> float:
        # Pages of an earlier call must not be hit; the conversation's own have another salt.
        self.engine.evict()
        start = time.perf_counter()
        self.engine.generate(prompt, max_new_tokens=1, salt="again", **GREEDY)
        return time.perf_counter() - start

    def ceilings(self, buffer_bytes: int, products: list[list[Any]]) -> dict[str, Any]:
        """Returns bytes/s of reads and FLOP/s of tiles and of the products [name, m, n, k]."""
        isa, threads = self.engine.isa, self.engine.threads
        return {
            "read": _C.measure_read(isa, threads, buffer_bytes, CEILING_SECONDS),
            "tiles": _C.measure_tiles(isa, threads, CEILING_SECONDS),
            "products": {
                name: _C.measure_linear(
                    isa, threads, "bfloat16", m, n, k, CEILING_SECONDS, order=tile_order(isa)
                )
                for name, m, n, k in products
            },
        }


if __name__ == "__main__":
    serve(LmchatRunner())
