"""Phases `results:MODEL`: whether the engine computes right results at a real model's sizes.

The programs of `ops` use small shapes. Here tokens and logits of the whole model are compared with
overlap and graphs on and off, in a batch and alone, beyond the first 2 GiB of the KV cache, by
default and deterministic, and one row of logits with torch.
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

from .end_to_end import GREEDY, engine_facts, read_all
from .reference import last_logits
from .settings import Settings, write_json
from .shapes import MODELS, write_config
from .timing import torch_device, torch_or_why

Floats = npt.NDArray[np.float32]
Tokens = list[list[int]]

# Root mean square of the difference of two rows of logits over that of the row. Rounding of
# activations to 16 bits gives 0.007 after 32 layers on a CPU; a wrong product or key gives more.
LARGEST_ERROR = 0.02
ONE_STEP = 64  # tokens of a prompt that no step time cuts
OFF = {"overlap": "TM_CUDA_OVERLAP", "graphs": "TM_CUDA_GRAPHS"}


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens. `held` is the KV that other sequences hold meanwhile, in bytes."""

    prompts: tuple[int, ...] = (5, 130, 700, 2100, 64, 17, 300, 1000)
    new: int = 24
    row: int = 200  # prompt whose last row of logits is compared with torch's
    held: int = 2 << 30
    piece: int = 4096
    timed: int = 72


TINY = Plan((5, 70), 4, 70, 0, 64, 4)


class Checks:
    """Checks and their results, written after each."""

    def __init__(self, settings: Settings, model: str) -> None:
        self.settings = settings
        self.plan = TINY if settings.tiny else Plan()
        self.shape = MODELS[model]
        self.end = time.monotonic() + settings.seconds
        self._path = settings.result_path(f"results:{model}")
        self.result: dict[str, Any] = {"model": model, "engines": {}, "checks": [], "figures": []}
        self.result["error"] = ""
        random = np.random.default_rng(1)
        sizes = (*self.plan.prompts, self.plan.row)
        ids = [random.integers(3, self.shape.vocab, size).tolist() for size in sizes]
        self.prompts, self.row = ids[:-1], ids[-1]

    def late(self, name: str) -> bool:
        """Returns whether another engine could end after the phase's limit, and records it then."""
        longest = max(facts["seconds"] for facts in self.result["engines"].values())
        if time.monotonic() + 1.3 * longest < self.end:
            return False
        self.result["skipped"] = f"no time was left for: {name}"
        return True

    def add(self, name: str, ok: bool, **facts: object) -> None:
        """Records a check; one that fails makes the phase fail."""
        self.result["checks"].append({"check": name, "ok": bool(ok), **facts})
        if not ok:
            self.result["error"] += ("; " if self.result["error"] else "") + name
        write_json(self._path, self.result)

    def same(self, name: str, ours: Tokens, theirs: Tokens) -> None:
        """Checks that all tokens are equal; otherwise records where they first differ."""
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
                prompt = len(self.prompts[i])
                return self.add(name, False, prompt_tokens=prompt, first_difference=at)
        return self.add(name, True, tokens=sum(map(len, ours)))

    def close(self, name: str, ours: Floats, theirs: Floats) -> None:
        """Checks the relative error of logits."""
        error = relative_error(ours, theirs)
        self.add(name, error <= LARGEST_ERROR, error=error, limit=LARGEST_ERROR)

    @contextlib.contextmanager
    def engine(
        self, name: str, *, deterministic: bool, off: tuple[str, ...] = ()
    ) -> Iterator[turbomind.Engine]:
        """Opens an engine with parts switched off, and records what it reports of itself."""
        gc.collect()  # the engine before this one: its memory is needed
        start = time.perf_counter()
        before = {variable: os.environ.get(variable) for variable in OFF.values()}
        os.environ.update({variable: "0" if part in off else "1" for part, variable in OFF.items()})
        try:
            engine = self._open(deterministic)
        finally:
            for variable, value in before.items():
                os.environ.pop(variable)
                if value is not None:
                    os.environ[variable] = value
        try:
            yield engine
            self._time(name, engine, deterministic, off)
        finally:
            facts, error = engine_facts(engine, self.settings, deterministic, off)
            facts["seconds"] = round(time.perf_counter() - start, 2)
            self.result["engines"][name] = facts
            self.add(f"{name}: the engine as it should be", not error, why=error)
            engine.close()

    def _time(
        self, name: str, engine: turbomind.Engine, deterministic: bool, off: tuple[str, ...]
    ) -> None:
        """Measures decoding alone, so that the engines show the gain of each part."""
        stream = engine.stream(self.row, max_new_tokens=self.plan.timed, salt="timed", **GREEDY)
        [times] = read_all([stream])
        skipped = min(8, len(times) - 2)
        ms = (times[-1] - times[skipped]) * 1e3 / (len(times) - 1 - skipped)
        figure = {"figure": "decode", "batch": 1, "context": len(self.row), "ms": ms}
        self.result["figures"].append(
            figure | {"engine": name, "deterministic": deterministic, "off": list(off)}
        )

    def _open(self, deterministic: bool) -> turbomind.Engine:
        plan = self.plan
        held = plan.held + plan.piece * self.shape.kv_bytes_per_token()
        tokens = sum(plan.prompts) + len(plan.prompts) * (plan.new + 128) + 4 * plan.row
        return turbomind.Engine(
            write_config(self.shape, Path(self.settings.work)),
            device=self.settings.device,
            dtype="bfloat16",
            load_format="dummy",
            max_batch_size=max(8, len(plan.prompts)),
            cache_memory=held + 3 * tokens * self.shape.kv_bytes_per_token() + (1 << 20),
            deterministic=deterministic,
            warm_up=False,
            threads=1 if self.settings.tiny else None,
        )

    def alone(self, engine: turbomind.Engine) -> Tokens:
        """Generates from each prompt by itself."""
        return [
            engine.generate(ids, max_new_tokens=self.plan.new, salt="alone", **GREEDY).token_ids
            for ids in self.prompts
        ]

    def in_one_step(self, tokens: Tokens) -> Tokens:
        """Returns the tokens of prompts that are computed in one step, however fast steps are.

        By default the bits of a prompt depend on how it is cut into steps.
        """
        pairs = zip(self.prompts, tokens, strict=True)
        return [each if len(ids) <= ONE_STEP else [] for ids, each in pairs]

    def batched(self, engine: turbomind.Engine, salt: str = "batched") -> Tokens:
        """Generates from all prompts at once."""
        streams = [
            engine.stream(ids, max_new_tokens=self.plan.new, salt=salt, **GREEDY)
            for ids in self.prompts
        ]
        return [stream.result().token_ids for stream in streams]


def relative_error(ours: Floats, theirs: Floats) -> float:
    """Returns the root mean square of the difference over that of `theirs`; infinite for NaN."""
    error = float(np.sqrt(np.mean(np.square(ours - theirs, dtype=np.float64))))
    size = float(np.sqrt(np.mean(np.square(theirs, dtype=np.float64))))
    return error / size if np.isfinite(error) and size > 0 else float("inf")


def run_phase(settings: Settings, model: str) -> dict[str, Any]:
    """Runs the checks. Those that find the most come first, for the time may end."""
    checks = Checks(settings, model)
    with checks.engine("plain", deterministic=True, off=("overlap", "graphs")) as engine:
        tokens = checks.alone(engine)
        row = engine.logits(checks.row)[-1]
        description = engine.info.description
    del engine
    with checks.engine("deterministic", deterministic=True) as engine:
        checks.same("alone, overlap and graphs on and off", checks.alone(engine), tokens)
        checks.same("batched and alone", checks.batched(engine), tokens)
        if checks.plan.held:
            with held(checks, engine):
                checks.same("beyond 2 GiB of KV", checks.batched(engine, "far"), tokens)
    del engine
    with checks.engine("default", deterministic=False) as engine:
        default = checks.alone(engine)
        default_row = engine.logits(checks.row)[-1]
        together = checks.batched(engine)
    del engine
    gc.collect()
    checks.close("a row of logits, default and deterministic", default_row, row)
    against_torch(checks, description, row, default_row)
    more: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("overlap", ("overlap",)), ("graphs", ("graphs",)),
    )  # fmt: skip
    for part, off in more:
        if checks.late(f"no {part}"):
            return checks.result
        with checks.engine(f"deterministic, no {part}", deterministic=True, off=off) as engine:
            checks.same(f"batched, {part} on and off", checks.batched(engine), tokens)
            if part == "overlap":
                for name, each in (("alone", default), ("batched", together)):
                    best(checks, f"default, {name}: the best tokens", engine, each)
        del engine
    if checks.late("default, plain"):
        return checks.result
    with checks.engine("default, plain", deterministic=False, off=("overlap", "graphs")) as engine:
        name = "default, overlap and graphs on and off"
        checks.same(name, checks.in_one_step(checks.alone(engine)), checks.in_one_step(default))
    return checks.result


@contextlib.contextmanager
def held(checks: Checks, engine: turbomind.Engine) -> Iterator[None]:
    """Fills the KV cache, so that sequences that begin meanwhile lie beyond `held` bytes."""
    plan, handles = checks.plan, []
    random = np.random.default_rng(2)
    count = -(-plan.held // (plan.piece * checks.shape.kv_bytes_per_token()))
    try:
        for _ in range(count):
            handles.append(engine.open(salt="held"))
            ids = random.integers(3, checks.shape.vocab, plan.piece).tolist()
            handles[-1].advance(0, ids, max_new_tokens=1, **GREEDY).result()
        yield
    finally:
        for handle in handles:
            handle.close()


def best(checks: Checks, name: str, engine: turbomind.Engine, tokens: Tokens) -> None:
    """Checks that greedy tokens of another arithmetic are the best ones of `engine`, or nearly.

    Tokens may differ where two logits nearly tie, and then all that follow.
    """
    worst = 0.0
    for ids, new in zip(checks.prompts[:3], tokens[:3], strict=True):
        logits = engine.logits(ids + new)[len(ids) - 1 : -1]
        chosen = logits[np.arange(len(new)), new]
        lost = (logits.max(axis=1) - chosen) / np.sqrt(np.mean(np.square(logits), axis=1))
        worst = max(worst, float(lost.max())) if np.isfinite(lost).all() else float("inf")
    limit = 5 * LARGEST_ERROR  # the errors of two logits, of a few times the mean
    checks.add(name, worst <= limit, lost=worst, limit=limit)


def against_torch(checks: Checks, description: Any, row: Floats, default_row: Floats) -> None:
    """Compares one row of logits with a decoder in torch that has the same weights."""
    torch, why = torch_or_why(checks.settings)
    if torch is None:
        checks.result["torch"] = why
        return
    try:
        theirs = last_logits(description, torch_device(checks.settings), checks.row)
    except RuntimeError as error:  # out of memory, or no kernels for this GPU
        checks.result["torch"] = str(error)[:500]
        return
    checks.result["torch"] = torch.__version__
    checks.close("a row of logits and torch's, deterministic", row, theirs)
    checks.close("a row of logits and torch's, default", default_row, theirs)
    if not checks.settings.emulated:
        torch.cuda.empty_cache()
