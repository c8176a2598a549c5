"""Phases `group:MODEL`: a model on several ranks (tensor parallelism) beside the same on one.

Two ranks take turns on one GPU, which checks their kernels and sums on any machine; then the two
wait for each other there, as the ranks of several GPUs do; then each GPU has a rank. The other
phases use one GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import turbomind
from turbomind import _C

from .end_to_end import GREEDY, NO_MOMENT, first_token_ms, step_ms
from .results import LARGEST_ERROR, relative_error
from .settings import Settings, write_json
from .shapes import MODELS, write_config

Floats = npt.NDArray[np.float32]
RANK_WAITS = "TM_CUDA_RANK_WAITS"


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens, and batches of decoding."""

    prompts: tuple[int, ...] = (5, 130, 700)
    new: int = 16
    context: int = 512
    batches: tuple[int, ...] = (1, 16)
    steps: int = 40
    prefill: int = 2048


TINY = Plan((5, 70), 3, 12, (1, 2), 6, 20)


@dataclass(frozen=True)
class Group:
    """The ranks of an engine: their name in the record, and the engine's options.

    `waits`: ranks on one GPU wait for each other, instead of taking turns.
    """

    name: str
    device: str
    ranks: int
    waits: bool = False


def groups_of(settings: Settings, most: int) -> list[Group]:
    """Returns the groups to measure, one rank first.

    Args:
        settings: The settings of the run.
        most: The largest number of ranks that the model can have.
    """
    first = f"{settings.device}:0"
    groups = [
        Group("one rank", settings.device, 1),
        Group("two ranks in turns on one GPU", f"{first},0", 2),
        Group("two ranks waiting on one GPU", f"{first},0", 2, waits=True),
    ]
    count = gpu_count(settings)
    ranks = 1 << (min(count, most).bit_length() - 1)  # powers of 2 divide heads and KV heads
    if ranks > 1:
        indices = ",".join(map(str, range(ranks)))
        groups.append(
            Group(f"a rank on each of {ranks} GPUs", f"{settings.device}:{indices}", ranks)
        )
    return groups


def gpu_count(settings: Settings) -> int:
    """Returns the number of GPUs; the emulator makes two."""
    return 2 if settings.emulated else sum(gpu.kind == "cuda" for gpu in _C.gpu_devices())


@contextlib.contextmanager
def rank_waits(on: bool) -> Iterator[None]:
    """Sets the switch that a GPU reads when an engine opens, and then what it was before."""
    before = os.environ.get(RANK_WAITS)
    os.environ[RANK_WAITS] = "1" if on else "0"
    try:
        yield
    finally:
        os.environ.pop(RANK_WAITS)
        if before is not None:
            os.environ[RANK_WAITS] = before


class Lab:
    """What one rank computes, and the figures and checks of all groups, written after each."""

    def __init__(self, settings: Settings, model: str) -> None:
        self.settings = settings
        self.plan = TINY if settings.tiny else Plan()
        self.shape = MODELS[model]
        self.result: dict[str, Any] = {"model": model, "engines": {}, "checks": [], "figures": []}
        self.result["error"] = ""
        self._path = settings.result_path(f"group:{model}")
        random = np.random.default_rng(3)
        self.prompts = [random.integers(3, self.shape.vocab, n).tolist() for n in self.plan.prompts]
        self.tokens: list[list[int]] = []  # of one rank
        self.logits: list[Floats] = []

    def prompt(self, tokens: int) -> list[int]:
        """Returns token ids, the same for each length."""
        ids: list[int] = (
            np.random.default_rng(tokens).integers(3, self.shape.vocab, tokens).tolist()
        )
        return ids

    def add(self, name: str, ok: bool, **facts: object) -> None:
        """Records a check; one that fails makes the phase fail."""
        self.result["checks"].append({"check": name, "ok": bool(ok), **facts})
        if not ok:
            self.result["error"] += ("; " if self.result["error"] else "") + name
        self.save()

    def save(self) -> None:
        """Writes the result so far."""
        write_json(self._path, self.result)

    @contextlib.contextmanager
    def engine(self, group: Group, deterministic: bool) -> Iterator[turbomind.Engine]:
        """Opens an engine and records what it reports of itself."""
        gc.collect()  # the engine before this one: its memory is needed
        start = time.perf_counter()
        plan = self.plan
        tokens = max(plan.batches) * (plan.context + 2 * plan.steps + 192) + 4 * plan.prefill
        with rank_waits(group.waits):
            engine = turbomind.Engine(
                write_config(self.shape, Path(self.settings.work)),
                device=group.device,
                tp=group.ranks,
                dtype="bfloat16",
                load_format="dummy",
                max_batch_size=max(plan.batches),
                cache_memory=4 * tokens * self.shape.kv_bytes_per_token() + (1 << 20),
                deterministic=deterministic,
                warm_up=False,
                threads=1 if self.settings.tiny else None,
            )
        try:
            yield engine
        finally:
            stats = engine.stats()
            self.result["engines"][f"{group.name}{', deterministic' if deterministic else ''}"] = {
                "device": engine.device,
                "ranks": [rank.weight_bytes + rank.cache_bytes for rank in stats.ranks],
                "shared_weight_bytes": stats.shared_weight_bytes,
                "library_note": engine.library_note or "",
                "steps": stats.steps,
                "steps_overlapped": stats.steps_overlapped,
                "seconds": round(time.perf_counter() - start, 2),
            }
            self.save()
            engine.close()


def run_phase(settings: Settings, model: str) -> dict[str, Any]:
    """Checks and measures each group; the first has one rank."""
    lab = Lab(settings, model)
    groups = groups_of(settings, MODELS[model].kv_heads)
    if len(groups) == 3:
        lab.result["skipped"] = "a rank on each GPU: there is one GPU"
    for group in groups:
        with lab.engine(group, deterministic=True) as engine:
            check(lab, group, engine)
        del engine
        with lab.engine(group, deterministic=False) as engine:
            measure(lab, group, engine)
        del engine
    return lab.result


def check(lab: Lab, group: Group, engine: turbomind.Engine) -> None:
    """Compares a group with itself in a batch, and with one rank."""
    new = lab.plan.new
    alone = [
        engine.generate(ids, max_new_tokens=new, salt="alone", **GREEDY).token_ids
        for ids in lab.prompts
    ]
    streams = [
        engine.stream(ids, max_new_tokens=new, salt="batched", **GREEDY) for ids in lab.prompts
    ]
    batched = [stream.result().token_ids for stream in streams]
    lab.add(f"{group.name}: batched and alone", batched == alone)
    again = engine.generate(lab.prompts[-1], max_new_tokens=new, salt="alone", **GREEDY)
    reused = again.token_ids == alone[-1] and again.reused_tokens > 0
    lab.add(f"{group.name}: KV computed and reused", reused, tokens=again.reused_tokens)
    if group.ranks == 1:
        lab.tokens = alone
    rows = [
        engine.logits(ids + tokens)[len(ids) - 1 : -1]
        for ids, tokens in zip(lab.prompts, lab.tokens, strict=True)
    ]
    if group.ranks == 1:
        lab.logits = rows
        return
    error = max(relative_error(a, b) for a, b in zip(rows, lab.logits, strict=True))
    name = f"{group.name}: logits of one rank"
    lab.add(name, error <= LARGEST_ERROR, error=error, limit=LARGEST_ERROR)
    lost = max(lost_by(a, tokens) for a, tokens in zip(rows, lab.tokens, strict=True))
    limit = 5 * LARGEST_ERROR  # the errors of two logits, of a few times the mean
    lab.add(f"{group.name}: tokens of one rank", lost <= limit, lost=lost, limit=limit)


def lost_by(logits: Floats, tokens: list[int]) -> float:
    """Returns by how much the best logits exceed those of the tokens, at most, in units of the
    rows' root mean square; infinite for NaN."""
    chosen = logits[np.arange(len(tokens)), tokens]
    lost = (logits.max(axis=1) - chosen) / np.sqrt(np.mean(np.square(logits), axis=1))
    return float(lost.max()) if np.isfinite(lost).all() else float("inf")


def measure(lab: Lab, group: Group, engine: turbomind.Engine) -> None:
    """Measures prefill and decoding, and with the profiler the sums over ranks in a step."""
    about = {"group": group.name, "device": group.device, "ranks": group.ranks}
    ids = lab.prompt(lab.plan.prefill)
    times = []
    for number in range(4):  # the first one warms up
        start = time.perf_counter()
        stream = engine.stream(ids, max_new_tokens=1, salt=f"{number}", **GREEDY)
        times.append(first_token_ms(stream, start))
    ms = sorted(times[1:])[1]
    lab.result["figures"].append({"figure": "prefill", "tokens": len(ids), "ms": ms} | about)
    for batch in lab.plan.batches:
        decode(lab, engine, batch)  # warms up
        figure = {"figure": "decode", "batch": batch, "context": lab.plan.context}
        figure |= decode(lab, engine, batch) | about
        if group.ranks > 1:
            figure |= sums(lab, engine, batch)
        lab.result["figures"].append(figure)
        lab.save()


def decode(lab: Lab, engine: turbomind.Engine, batch: int, profile: bool = False) -> dict[str, Any]:
    """Measures a step while all sequences decode; `profile` starts the profiler for these steps."""
    context, steps = lab.plan.context, lab.plan.steps
    handles = [engine.open(salt=f"decode {number}") for number in range(batch)]
    try:
        for handle in handles:
            handle.advance(0, lab.prompt(context), max_new_tokens=1, **GREEDY).result()
        if profile:
            engine.profile()
        ms = step_ms(
            [handle.advance(context, [3], max_new_tokens=steps, **GREEDY) for handle in handles],
            steps,
        )
    finally:
        for handle in handles:
            handle.close()
    return {"skipped": NO_MOMENT.format(steps)} if ms is None else {"ms": ms}


def sums(lab: Lab, engine: turbomind.Engine, batch: int) -> dict[str, float]:
    """Returns the milliseconds of the sums in a step, and of waiting for their parts.

    They are those of the rank that takes the longest. Profiled steps are not captured.
    """
    decode(lab, engine, batch, profile=True)
    ops = engine.stats().ops
    engine.profile(False)
    steps = ops["embed"]["calls"]
    named = (("reduce_ms", "reduce"), ("wait_ms", "reduce_wait"))
    return {name: ops.get(op, {"ns": 0})["ns"] / 1e6 / steps for name, op in named}
