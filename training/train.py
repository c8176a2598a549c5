"""Trains memo: `python -m training.train --dialogues FOLDER --run FOLDER`.

A run folder holds tokenizer.json, state.pt (from which a stopped run continues), loss.jsonl (a line
every 20 steps) and, at the end, the model in `model/`. Matrices are trained with Muon (Jordan et
al. 2024), embeddings and norms with AdamW (Loshchilov and Hutter 2019). Forward and backward passes
use bfloat16 weights, updates float32 ones. The learning rate rises, stays, and falls to zero.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training import corpora, tokenizer
from training.data import BEHIND, Mixture
from training.grammar import Composer
from training.model import Memo, Shape, save

SEED = 20261121
STEPS = 5000
BATCH_TOKENS = 8192
_WARM, _FALL = 60, 0.35  # steps; share of the steps
_MATRIX_RATE, _OTHER_RATE = 0.01, 0.003
_LOG_EVERY, _SAVE_EVERY = 20, 200
# Chats of the grammar that the tokenizer is trained on, beside the real dialogues.
_TOKENIZER_CHATS = 30_000


def make_tokenizer(dialogues: Path) -> Tokenizer:
    """Trains memo's tokenizer on the real dialogues and chats of the grammar."""

    def texts() -> Iterator[str]:
        for chat in corpora.read_all(dialogues):
            yield from (message["content"] for message in chat)
        composer = Composer(SEED)
        for _ in range(_TOKENIZER_CHATS):
            yield from (message["content"] for message in composer.chat().messages)

    return tokenizer.train(texts())


class Trainer:
    """The model, its optimizers and the progress of the training."""

    def __init__(self, shape: Shape, steps: int) -> None:
        torch.manual_seed(SEED)
        self.model = Memo(shape)
        self.masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.model.bfloat16()
        matrices = [p for name, p in self.masters.items() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in self.masters.items() if p.dim() != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=_MATRIX_RATE, weight_decay=0.05, adjust_lr_fn="original"),
            torch.optim.AdamW(others, lr=_OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.rates = (_MATRIX_RATE, _OTHER_RATE)
        self.steps = steps
        self.step = 0
        self.chunk = 0  # the current chunk of data, and the number of its finished batches
        self.batch = 0
        self.tokens = 0

    def learn(self, ids: Tensor, weights: Tensor) -> float:
        """Takes one step on a batch and returns its mean loss."""
        total, count = self.model.loss(ids, weights)
        loss = total / count
        loss.backward()
        norm = 0.0
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            self.masters[name].grad = p.grad.float()
            norm += float(self.masters[name].grad.square().sum())
            p.grad = None
        scale = min(1.0, 1.0 / (norm**0.5 + 1e-6))
        factor = self._factor()
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
                for p in group["params"]:
                    p.grad.mul_(scale)
            optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])
                self.masters[name].grad = None
        self.step += 1
        self.tokens += ids.numel()
        return float(loss.detach())

    def _factor(self) -> float:
        left = (self.steps - self.step) / (self.steps * _FALL)
        return min(1.0, (self.step + 1) / _WARM, left)

    def state(self) -> dict[str, Any]:
        """Returns the state that a stopped run continues from."""
        return {
            "weights": self.masters,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "steps": self.steps,
            "place": (self.step, self.chunk, self.batch, self.tokens),
        }

    def begin_with(self, weights: dict[str, Tensor]) -> None:
        """Loads the `weights` of a saved model.

        Raises:
            ValueError: names a weight of another shape.
        """
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if weights[name].shape != p.shape:
                    raise ValueError(
                        f"{name}: {list(weights[name].shape)}, expected {list(p.shape)}"
                    )
                self.masters[name].copy_(weights[name])
                p.copy_(self.masters[name])

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state of a stopped run."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.masters[name].copy_(state["weights"][name])
                p.copy_(self.masters[name])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.chunk, self.batch, self.tokens = state["place"]


def run(
    dialogues: Path,
    folder: Path,
    *,
    shape: Shape,
    steps: int = STEPS,
    until: int | None = None,
    behind: Path | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> None:
    """Trains in `folder`, or continues a stopped run there.

    Args:
        until: the step to stop at, before `steps`, without writing a model.
        behind: the folder of a model to start from, with its weights, its tokenizer and the data's
            phase for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if behind is not None and not (folder / "tokenizer.json").exists():
        shutil.copy(behind / "tokenizer.json", folder / "tokenizer.json")
    words = _tokenizer(dialogues, folder)
    trainer = Trainer(shape, steps)
    options = {"batch_tokens": batch_tokens, **dataclasses.asdict(shape)}
    if behind is not None and not (folder / "state.pt").exists():
        trainer.begin_with(load_file(behind / "model.safetensors"))
        trainer.chunk = BEHIND
    _resume(trainer, folder, options)
    print(f"{sum(p.numel() for p in trainer.masters.values()):,} parameters", flush=True)
    mixture = Mixture(dialogues, words, seed=SEED, context=shape.context)
    _loop(trainer, mixture, folder, options, min(until or steps, steps))
    if trainer.step < steps:
        return
    begin, end = tokenizer.id_of(words, tokenizer.BEGIN), tokenizer.id_of(words, tokenizer.END)
    ids = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    save(trainer.masters, shape, folder / "model", **ids)
    tokenizer.save(words, folder / "model", shape.context)


def _resume(trainer: Trainer, folder: Path, options: dict[str, Any]) -> None:
    """Restores the state in `folder`, if there is one, of a run with the same options."""
    if not (folder / "state.pt").exists():
        return
    state = _state(folder, options)
    falls = min(state["steps"], trainer.steps) * (1 - _FALL)
    if state["steps"] != trainer.steps and state["place"][0] > falls:
        raise ValueError(f"steps: the rate falls for {state['steps']} already, saw {trainer.steps}")
    trainer.restore(state)
    print(f"going on at step {trainer.step}", flush=True)


def _state(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of the run in `folder`, which must have the same options."""
    state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    for name, value in options.items():
        if state["options"][name] != value:
            raise ValueError(f"{name}: the run has {state['options'][name]}, saw {value}")
    return state


def _tokenizer(dialogues: Path, folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        make_tokenizer(dialogues).save(str(folder / "tokenizer.new"))
        os.replace(folder / "tokenizer.new", path)
    return Tokenizer.from_file(str(path))


def _loop(
    trainer: Trainer, mixture: Mixture, folder: Path, options: dict[str, Any], until: int
) -> None:
    begun, losses, tokens = time.monotonic(), [], trainer.tokens
    with _log(folder / "loss.jsonl", trainer.step) as log:
        for ids, weights in _batches(trainer, mixture, options["batch_tokens"], until):
            losses.append(trainer.learn(ids, weights))
            if trainer.step % _LOG_EVERY == 0:
                line = {
                    "step": trainer.step,
                    "tokens": trainer.tokens,
                    "loss": round(sum(losses) / len(losses), 4),
                    "tokens_per_second": round(
                        (trainer.tokens - tokens) / (time.monotonic() - begun)
                    ),
                }
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
                losses = []
            if trainer.step % _SAVE_EVERY == 0 or trainer.step == until:
                _save_state(trainer, folder, options)


def _batches(
    trainer: Trainer, mixture: Mixture, batch_tokens: int, until: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches from the trainer's position to the step `until`, and counts them."""
    while trainer.step < until:
        batches = mixture.chunk(trainer.chunk, batch_tokens)
        while trainer.batch < len(batches) and trainer.step < until:
            trainer.batch += 1
            yield batches[trainer.batch - 1]
        if trainer.batch == len(batches):
            trainer.chunk, trainer.batch = trainer.chunk + 1, 0


def _log(path: Path, step: int) -> TextIO:
    """Returns the log without lines of steps that will run again."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    path.write_text("".join(f"{line}\n" for line in kept))
    return path.open("a")


def _save_state(trainer: Trainer, folder: Path, options: dict[str, Any]) -> None:
    torch.save({**trainer.state(), "options": options}, folder / "state.new")
    os.replace(folder / "state.new", folder / "state.pt")


def _with_large_pages() -> None:
    """Restarts the process with a malloc that reuses its memory, in large pages.

    Each step allocates the same buffers, so that a quarter more tokens are processed per second (2
    cores, glibc 2.36). A C library without these settings ignores them.
    """
    if "GLIBC_TUNABLES" not in os.environ:
        keep = "mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184"
        os.environ["GLIBC_TUNABLES"] = f"glibc.malloc.hugetlb=1:glibc.malloc.{keep}"
        os.execv(sys.executable, [sys.executable, "-m", "training.train", *sys.argv[1:]])


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dialogues", type=Path, required=True, help="folder of the *.jsonl.xz")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--until", type=int, help="stop at this step; the same command goes on")
    parser.add_argument("--behind", type=Path, help="folder of a model to begin with")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    _with_large_pages()
    torch.set_num_threads(options.threads)
    run(
        options.dialogues,
        options.run,
        shape=Shape(),
        steps=options.steps,
        until=options.until,
        behind=options.behind,
        batch_tokens=options.batch_tokens,
    )


if __name__ == "__main__":
    main()
