"""What an engine would be, from configurations and headers of files alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

import turbomind._C as _C
from turbomind.config.defaults import CacheSize
from turbomind.config.device import (
    device_name,
    gpu_options,
    is_automatic,
    model_fault,
    rank_count,
)
from turbomind.config.engine_options import (
    EngineOptions,
    complete,
    core_options,
    integer_option,
    thread_count,
)
from turbomind.config.memory_budget import (
    Part,
    check_gpu_memory,
    check_memory,
    gpu_parts,
    host_parts,
    kept_bytes,
)
from turbomind.engine.tiers import Tiers
from turbomind.errors import Error, InternalError, InvalidRequest, ModelError
from turbomind.loading.loader import (
    ModelInfo,
    check_load_format,
    describe,
    float16_note,
    load,
    unknown_fields_note,
)
from turbomind.loading.quantize import read_quantize
from turbomind.machine import available_memory
from turbomind.params import in_form, wrong

REFUSALS = (InvalidRequest, ModelError, InternalError)
"""Errors of a GPU after which the CPU computes, where no device is named."""


@dataclass(frozen=True)
class Plan:
    """What an engine would be. `plan()` makes it; nothing is loaded.

    Attributes:
        model: Facts about the model.
        options: The value of every engine option; see `EngineOptions`.
        gpus: The GPU of each rank; none: the CPU.
        threads: Threads that compute on the CPU.
        isa: Instruction set of the CPU.
        core: Options of steps and memory, as the core takes them.
        cache: The size of the KV cache.
        tiers: The lower tiers.
        available: Bytes of memory that this process could use when the plan was made.
        fault: Why the named GPUs cannot run the model; "" where they can, and for the CPU.
        device_note: Why the CPU computes in place of GPUs that "auto" has found; None else.
    """

    model: ModelInfo
    options: Mapping[str, Any]
    gpus: Sequence[_C.GpuOptions]
    threads: int
    isa: str
    core: _C.EngineOptions
    cache: CacheSize
    tiers: Tiers
    available: int
    fault: str = ""
    device_note: str | None = None

    @property
    def device(self) -> str:
        """The device: "cpu", "cuda:0", "cuda:0,1" or "cuda_emulated"."""
        return device_name(self.gpus)

    @property
    def tp(self) -> int:
        """The ranks that the model is cut over."""
        return self.model.tp

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The memory that the engine takes once its cache is full, by part."""
        if self.gpus:
            return gpu_parts(self.model, self.core, self.cache, self.gpus)
        return host_parts(self.model, self.core, self.cache, self.available, self.isa, self.threads)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the model before it is loaded, a sentence each."""
        notes = []
        if not self.gpus:
            notes = [_C.amx_hindrance() if self.options["isa"] == "auto" else ""]
            notes.append(float16_note(self.model, self.isa))
        notes.append(unknown_fields_note(self.model) if self.model.unknown_fields else "")
        return [note for note in (*notes, self.model.head_note) if note]

    def check(self, whose: str = "that this process may use now") -> None:
        """Refuses what cannot be opened.

        Args:
            whose: Describes `available` in the message.

        Raises:
            ModelError: The GPUs cannot run the model.
            InvalidRequest: Weights, cache and steps do not fit the memory; the message lists the
                parts and what to lower.
        """
        if self.fault:
            raise ModelError(self.fault)
        if self.gpus:
            check_gpu_memory(self.model, self.core, self.cache, self.gpus)
        else:
            check_memory(self.model, self.parts, self.available, whose)

    def load(self) -> _C.Model:
        """Loads the weights.

        Raises:
            ModelError: A weight cannot be used.
        """
        return load(
            self.model,
            isa=self.isa,
            threads=self.threads,
            load_format=self.options["load_format"],
            seed=self.options["seed"],
            digests=_path("weights_digests", self.options["weights_digests"]),
            gpus=self.gpus,
        )

    @property
    def kept_bytes(self) -> int:
        """Bytes that steps and the host tier take on the CPU beside weights and KV; 0 on GPUs."""
        if self.gpus:
            return 0
        return kept_bytes(self.model, self.core, self.isa, self.threads)

    def on_cpu(self, refusal: Error) -> Plan:
        """Returns the plan of the CPU in place of GPUs that have refused the model.

        Raises:
            Error: The CPU does not take it either, in its own words.
        """
        return _in_place_of(self.gpus, refusal, self.model.path, self.options, True)


def plan(
    path: str | os.PathLike[str], *, weights: bool = True, **options: Unpack[EngineOptions]
) -> Plan:
    """Plans an engine: what `turbomind.Engine` would open with these options.

    Where "auto" finds GPUs that refuse the model or have no room for it, the plan is that of the
    CPU. Other reasons why an engine would not open are left to `Plan.check()`.

    Args:
        path: A model folder, a GGUF file, a hub name or a config.json.
        weights: Also looks at the headers of weight files, of a hub name after downloading them.
        options: Those of the engine.

    Raises:
        InvalidRequest: An option is wrong.
        NotFound: There is no such model.
        ModelError: The model cannot be used.
    """
    asked = complete(options)
    return planned(path, asked, check_options(asked), weights)


def planned(
    path: str | os.PathLike[str],
    asked: Mapping[str, Any],
    gpus: Sequence[_C.GpuOptions],
    weights: bool,
) -> Plan:
    """Returns the plan of GPUs, or, where they were found automatically and refuse it, of the CPU.

    Args:
        path: The model.
        asked: The value of every option, checked.
        gpus: The GPU of each rank; none: the CPU.
        weights: Look at weight files.
    """
    if not gpus or not is_automatic(asked["device"]):
        return _plan_on(gpus, path, asked, weights)
    try:
        found = _plan_on(gpus, path, asked, weights)
        found.check()
        return found
    except REFUSALS as error:
        refusal = error
    return _in_place_of(gpus, refusal, path, asked, weights)


def _in_place_of(
    gpus: Sequence[_C.GpuOptions],
    refusal: Error,
    path: str | os.PathLike[str],
    asked: Mapping[str, Any],
    weights: bool,
) -> Plan:
    """Returns the plan of the CPU in place of GPUs that have refused the model."""
    note = f"{device_name(gpus)} does not take the model: {refusal}"
    return replace(_plan_on([], path, asked, weights), device_note=note)


def check_options(asked: Mapping[str, Any]) -> list[_C.GpuOptions]:
    """Checks options without a look at the model.

    Args:
        asked: The value of every option.

    Returns:
        The GPU of each rank; none: the CPU.

    Raises:
        InvalidRequest: An option is wrong, or a named GPU does not work.
    """
    ranks = rank_count(asked["tp"], asked["device"])
    names = ("device", "deterministic", "isa", "dtype", "kv_dtype")
    gpus = gpu_options(**{name: asked[name] for name in names}, tp=ranks)
    check_host_options(asked)
    return gpus


@in_form()
def check_host_options(asked: Mapping[str, Any]) -> None:
    """Checks options but for those of devices.

    Raises:
        InvalidRequest: An option is wrong.
    """
    thread_count(asked["threads"])
    integer_option("seed", asked["seed"])
    if not isinstance(asked["isa"], str):
        raise wrong("isa", asked["isa"], "a string")
    _C.resolve_isa(asked["isa"])
    read_quantize(*(asked[name] for name in ("quantize", "head", "group_size")))
    check_load_format(asked["load_format"])
    _tiers(core_options(asked)[0], asked)


def _tiers(core: _C.EngineOptions, asked: Mapping[str, Any]) -> Tiers:
    return Tiers(core, *(asked[name] for name in ("host_memory", "page_folder", "disk_quota")))


@in_form()
def _plan_on(
    gpus: Sequence[_C.GpuOptions],
    path: str | os.PathLike[str],
    asked: Mapping[str, Any],
    weights: bool,
) -> Plan:
    core, cache = core_options(asked, gpus)
    tiers = _tiers(core, asked)
    model = describe(
        path,
        **{name: asked[name] for name in ("dtype", "kv_dtype", "rope_length", "revision")},
        weights=weights and asked["load_format"] != "dummy",
        gpu=bool(gpus),
        quantize=read_quantize(*(asked[name] for name in ("quantize", "head", "group_size"))),
        tp=rank_count(asked["tp"], asked["device"]),
    )
    return Plan(
        model=model,
        options=asked,
        gpus=gpus,
        threads=thread_count(asked["threads"]),
        isa=_C.resolve_isa(asked["isa"]),
        core=core,
        cache=cache,
        tiers=tiers,
        available=available_memory(),
        fault=model_fault(model, gpus) if gpus else "",
    )


def _path(name: str, value: str | os.PathLike[str] | None) -> Path | None:
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise wrong(name, value, "the path of a file or None")
    return Path(text)
