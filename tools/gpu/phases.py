"""The phases of a run in their order, with the time limit of each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from .machine import no_gpu
from .settings import Settings


@dataclass(frozen=True)
class Phase:
    """A phase with its limit in seconds; slow phases shorten those after them."""

    name: str
    limit: float


TOTAL = 530.0  # seconds of all phases together, without REST
# The most telling phases come first: whether a whole model is right at real sizes, its figures,
# then the kernels one by one. Measured: the build takes 390 CPU seconds (40 s on 16 cores), the
# drivers of `ops` 10 CPU seconds per seed. Estimated: at half of an H200's ceilings the figures of
# the 8B model take 30 s (20 of them for 64 prompts of 8,192 tokens, left out if they do not fit),
# and loading it 60 s; the results of the 1B model take 35 s. A limit is several times that.
CHECK = (
    Phase("environment", 25),
    Phase("build", 240),
    Phase("ceilings", 45),
    Phase("results:llama-3.2-1b", 70),
    Phase("end_to_end:llama-3-8b", 100),
    Phase("ops", 90),
    Phase("speed", 95),
    Phase("end_to_end:llama-3.2-1b", 60),
    Phase("group:llama-3.2-1b", 70),
    Phase("results:llama-3-8b", 110),
    Phase("end_to_end:qwen2.5-7b", 80),
)
REST = (Phase("suite", 120), Phase("sanitizer", 120))  # with --rest
PEERS = (
    Phase("environment", 25),
    Phase("peers:llama-3.2-1b", 110),
    Phase("peers:llama-3-8b", 170),
    Phase("peers:qwen2.5-7b", 150),
)
# On tiny shapes one model is enough.
TINY_CHECK = (
    *(phase for phase in CHECK if ":" not in phase.name),
    Phase("end_to_end:tiny", 150),
    Phase("results:tiny", 150),
    Phase("group:tiny", 150),
)
TINY_PEERS = (Phase("environment", 25), Phase("peers:tiny", 150))


def phases_of(*, peers: bool, tiny: bool, rest: bool = False) -> tuple[Phase, ...]:
    """Returns the phases of a run."""
    if peers:
        return TINY_PEERS if tiny else PEERS
    return (TINY_CHECK if tiny else CHECK) + (REST if rest else ())


def seconds_of(*, rest: bool) -> float:
    """Returns the limit of all phases together, in seconds."""
    return TOTAL + (sum(phase.limit for phase in REST) if rest else 0.0)


WITHOUT_GPU = {"environment", "build"}
# Phase -> module and function; phases of a model also take its name.
_WORK = {
    "environment": ("machine", "run_phase"),
    "build": ("building", "run_phase"),
    "ceilings": ("ceilings", "run_phase"),
    "ops": ("ops", "run_phase"),
    "speed": ("speed", "run_phase"),
    "suite": ("suite", "run_phase"),
    "sanitizer": ("ops", "run_sanitizer"),
    "end_to_end": ("end_to_end", "run_phase"),
    "results": ("results", "run_phase"),
    "group": ("group", "run_phase"),
    "peers": ("peers", "run_phase"),
}


def run_one(settings: Settings, name: str) -> dict[str, Any]:
    """Runs a phase in this process and returns its result."""
    kind, _, model = name.partition(":")
    if kind not in _WORK:
        raise ValueError(f"phase is {name!r}, expected one of {', '.join(_WORK)}")
    if kind not in WITHOUT_GPU and not settings.emulated and (why := no_gpu()):
        return {"not_available": why}
    module, function = _WORK[kind]
    work = getattr(importlib.import_module(f".{module}", __package__), function)
    found = partial(work, settings, model) if model else partial(work, settings)
    result = found()
    assert isinstance(result, dict)
    return result
