"""The protocol between compare.py or turns.py and one runtime's runner process.

One JSON object a line, on stdin and stdout; the runner lives until `quit` or the end of stdin, so
the model stays loaded between measurements:

    {"op": "load", "model": folder, "threads": 2, "max_batch": 16}  -> {"versions": {...}}
    {"op": "prefill", "tokens": 512, "seed": 7}                     -> {"seconds": ...}
    {"op": "decode", "batch": 8, "context": 512, "steps": 32, "seed": 8}
                                                      -> {"tokens": 256, "seconds": ...}
    {"op": "turn", "history": 1500, "new": 64, "seed": 9}           -> {"seconds": ...}
    {"op": "chat_start"}                                            -> {}
    {"op": "chat_turn", "new": 64, "reply": 64, "seed": 10}
                                                      -> {"seconds": ..., "history": 1280}
    {"op": "chat_again"}                                            -> {"seconds": ...}

A failure answers {"error": text}. Prompts are token ids sampled from each request's seed, so no
runtime can answer from KV of an earlier measurement. Only the standard library is used here:
every peer's environment imports this file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

# Ids below this may be special tokens of the dummy tokenizers.
FIRST_ID = 300
MAX_CONTEXT = 4096
# The first sequences of a batch decode while the last ones prefill: the tokens they may generate.
SLACK_TOKENS = 512


class Loader(ABC):
    """One runtime. Token ids are plain ints, times are seconds of wall clock."""

    packages: tuple[str, ...] = ()

    @abstractmethod
    def load(self, model: Path, threads: int, max_batch: int) -> None:
        """Loads the model folder that make_models.py wrote."""

    def versions(self) -> dict[str, str]:
        return {name: metadata.version(name) for name in self.packages}

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one request of the protocol. A runner may add operations."""
        op = request["op"]
        if op == "load":
            model = Path(request["model"])
            self.vocab: int = json.loads((model / "config.json").read_text())["vocab_size"]
            self.load(model, request["threads"], request["max_batch"])
            return {"versions": self.versions()}
        raise ValueError(f"unknown operation {op!r}")

    def ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, self.vocab) for _ in range(count)]


class Runner(Loader):
    """A runtime that can be timed on prompts and batches."""

    @abstractmethod
    def prefill(self, ids: list[int]) -> float:
        """Returns the seconds from submitting a prompt to its first token, alone."""

    @abstractmethod
    def decode(self, prompts: list[list[int]], steps: int) -> tuple[int, float]:
        """Returns tokens and seconds of `steps` greedy steps with all prompts in the batch."""

    @abstractmethod
    def turn(self, history: list[int], new: list[int]) -> float:
        """Returns the seconds to the first token of history + new, with history cached."""

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op not in ("prefill", "decode", "turn"):
            return super().call(request)
        rng = random.Random(request["seed"])
        if op == "prefill":
            return {"seconds": self.prefill(self.ids(rng, request["tokens"]))}
        if op == "decode":
            prompts = [self.ids(rng, request["context"]) for _ in range(request["batch"])]
            tokens, seconds = self.decode(prompts, request["steps"])
            return {"tokens": tokens, "seconds": seconds}
        history = self.ids(rng, request["history"])
        return {"seconds": self.turn(history, self.ids(rng, request["new"]))}


class ChatRunner(Loader):
    """A runtime that caches the KV of one conversation between turns."""

    @abstractmethod
    def chat_start(self) -> None:
        """Drops the conversation and starts an empty one."""

    @abstractmethod
    def chat_turn(self, past: list[int], new: list[int], reply: int) -> tuple[list[int], float]:
        """Answers `past` + `new`, where `past` is the conversation so far, with `reply` tokens.

        Returns the reply and the seconds to its first token.
        """

    @abstractmethod
    def chat_again(self, prompt: list[int]) -> float:
        """Returns the seconds to the first token of `prompt` without any cached KV of it.

        The KV of the conversation itself stays.
        """

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "chat_start":
            self.past: list[int] = []
            self.chat_start()
            return {}
        if op == "chat_turn":
            new = self.ids(random.Random(request["seed"]), request["new"])
            past, self.prompt = self.past, self.past + new
            reply, seconds = self.chat_turn(past, new, request["reply"])
            if len(reply) != request["reply"]:
                raise RuntimeError(f"a reply of {len(reply)} tokens, not {request['reply']}")
            self.past = self.prompt + reply
            return {"seconds": seconds, "history": len(past)}
        if op == "chat_again":
            return {"seconds": self.chat_again(self.prompt)}
        return super().call(request)


def time_steps(step: Callable[[], dict[int, int]], rows: int, steps: int) -> tuple[int, float]:
    """Drives an engine step by step. `step` returns the number of new tokens by sequence.

    The clock starts when every sequence has its first token (all prompts are prefilled) and stops
    when each has `steps` more. Returns the tokens generated in between and the seconds.
    """
    gained = [0] * rows

    def until(goal: int) -> None:
        while min(gained) < goal:
            for row, count in step().items():
                gained[row] += count

    until(1)
    gained[:] = [0] * rows
    start = time.perf_counter()
    until(steps)
    return sum(gained), time.perf_counter() - start


def serve(runner: Loader) -> None:
    """Answers requests until stdin ends. Everything that a runtime prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            answer = runner.call(request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    answers.flush()
    # Some runtimes hang or crash in their exit handlers; everything has been answered by now.
    os._exit(0)
