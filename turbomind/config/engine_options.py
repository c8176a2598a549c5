"""Options of an engine, checked before anything is loaded or started."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import turbomind._C as _C
from turbomind.config.defaults import CacheSize, defaults
from turbomind.machine import physical_cores
from turbomind.params import MAX_SIZE, integer, set_option, wrong

_INT_MAX = (1 << 31) - 1
_MAX_THREADS = 1024  # limit of the core's thread pool
_INTEGERS = {
    "max_batch_size": 4096,
    "max_context_tokens": MAX_SIZE,
    "cache_pages": MAX_SIZE,
    "prefill_chunk": _INT_MAX,
}  # the largest value of each


def core_options(
    given: Mapping[str, Any], gpus: Sequence[_C.GpuOptions] = ()
) -> tuple[_C.EngineOptions, CacheSize]:
    """Returns the core's options of steps and memory, with the defaults of the device.

    Args:
        given: Options of `Engine`; None is the default. Others than those of steps and memory are
            ignored.
        gpus: The GPU of each rank; none for the CPU.

    Raises:
        InvalidRequest: One is out of range.
    """
    options, absent = _C.EngineOptions(), defaults(gpus)
    options.prefill_chunk, options.step_ms = absent.prefill_chunk, absent.step_ms
    options.warm_up = absent.warm_up
    for name, most in _INTEGERS.items():
        if given.get(name) is not None:
            setattr(options, name, integer(name, given[name], 1, most))
    for name, expected in (
        ("step_ms", "a number of milliseconds above 0"),
        ("warm_up", "True, False or None"),
    ):
        if given.get(name) is not None:
            set_option(options, name, given[name], expected)
    set_option(options, "prefix_reuse", given.get("prefix_reuse", True), "True or False")
    if not 0 < options.step_ms < math.inf:
        raise wrong("step_ms", given["step_ms"], "a number of milliseconds above 0")
    return options, CacheSize(given.get("cache_memory"), absent)


def thread_count(threads: int | None) -> int:
    """Returns the number of threads that compute.

    Raises:
        InvalidRequest: It is out of range.
    """
    return physical_cores() if threads is None else integer("threads", threads, 1, _MAX_THREADS)
