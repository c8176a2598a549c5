"""A model as an engine with some options loads it, from its configuration and heads of files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import turbomind._C as _C
from turbomind.config.device import gpu_options, rank_count
from turbomind.loading.loader import ModelInfo, describe
from turbomind.loading.quantize import read_quantize

DESCRIBING = (
    "device", "tp", "dtype", "quantize", "head", "group_size", "kv_dtype", "rope_length",
)  # fmt: skip
"""Engine options that a description depends on, revision aside."""


def described(
    model: str | os.PathLike[str], engine: Mapping[str, Any], weights: bool = True
) -> ModelInfo:
    """Describes the model as an engine with these options loads it.

    Args:
        model: Folder, GGUF file or hub name of the model.
        engine: The given engine options.
        weights: Also look at the weight files.
    """
    given = _given(engine, "dtype", "kv_dtype", "rope_length")
    return describe(
        model,
        **given,
        weights=weights,
        gpu=bool(chosen_gpus(engine)),
        quantize=read_quantize(*map(engine.get, ("quantize", "head", "group_size"))),
        tp=rank_count(**_given(engine, "tp", "device")),
    )


def chosen_gpus(engine: Mapping[str, Any]) -> list[_C.GpuOptions]:
    """Returns the GPU of each rank of an engine with these options; none for the CPU."""
    given = _given(engine, "device", "deterministic", "isa", "dtype", "kv_dtype", "tp")
    return gpu_options(**given)


def _given(engine: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: engine[name] for name in names if name in engine}
