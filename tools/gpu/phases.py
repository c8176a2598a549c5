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


TOTAL = 470.0  # seconds of all phases together
# The most important phases come first. Measured: the build takes 390 CPU seconds (40 s on 16
# cores), the drivers of `ops` 10 CPU seconds per seed. Estimated: at half of an H200's ceilings the
# figures of the 8B model take 30 s (20 of them for 64 prompts of 8,192 tokens, left out if
# they do not fit), and loading it 60 s. A limit is several times that.
CHECK = (
    Phase("environment", 25),
    Phase("build", 240),
    Phase("ceilings", 60),
    Phase("ops", 90),
    Phase("end_to_end:llama-3-8b", 100),
    Phase("speed", 95),
    Phase("end_to_end:llama-3.2-1b", 60),
    Phase("end_to_end:qwen2.5-7b", 80),
    Phase("suite", 75),
    Phase("sanitizer", 100),
)
PEERS = (
    Phase("environment", 25),
    Phase("peers:llama-3.2-1b", 110),
    Phase("peers:llama-3-8b", 170),
    Phase("peers:qwen2.5-7b", 150),
)
# On tiny shapes one model is enough.
TINY_CHECK = (
    *(phase for phase in CHECK if not phase.name.startswith("end_to_end:")),
    Phase("end_to_end:tiny", 150),
)
TINY_PEERS = (Phase("environment", 25), Phase("peers:tiny", 150))


def phases_of(*, peers: bool, tiny: bool) -> tuple[Phase, ...]:
    """Returns the phases of a run."""
    if tiny:
        return TINY_PEERS if peers else TINY_CHECK
    return PEERS if peers else CHECK


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
