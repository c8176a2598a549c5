"""What engine options stand for that are not given, and shares of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import turbomind._C as _C
from turbomind.errors import InvalidRequest
from turbomind.machine import available_memory, parse_bytes, parse_share, physical_memory


@dataclass(frozen=True)
class Defaults:
    """A device's: memory for keys and values, most prompt tokens of a step, target milliseconds,
    whether an engine warms up."""

    cache_memory: str
    prefill_chunk: int
    step_ms: float
    warm_up: bool


CPU = Defaults("2GiB", 512, 100.0, warm_up=False)
GPU = Defaults("90%", 2048, 25.0, warm_up=True)
# Its memory is the host's, and made up; no first step of it is slower than others.
EMULATED = replace(GPU, cache_memory="64MiB", warm_up=False)


def defaults(gpu: _C.GpuOptions | None) -> Defaults:
    """Those of a GPU, or of the CPU."""
    if gpu is None:
        return CPU
    return EMULATED if gpu.kind == "emulated" else GPU


class CacheSize:
    """What `cache_memory` asks for: bytes, or a share of what is free once a model is loaded."""

    def __init__(self, value: int | str) -> None:
        self.share = parse_share("cache_memory", value)
        self.bytes = 0 if self.share is not None else _bytes(value)

    def of(self, free: int) -> int:
        """Bytes where so many are free."""
        return self.bytes if self.share is None else int(self.share * max(0, free))

    def on_host(self, loading: int = 0) -> int:
        """Bytes on the CPU; `loading`: weights that are still to be loaded."""
        return self.of(available_memory() - loading)

    def set(self, options: _C.EngineOptions, model: _C.Model, gpu: _C.GpuOptions | None) -> None:
        """Sets the engine's options for a model that is loaded. On the CPU, raises InvalidRequest
        for more than this machine has; a GPU says itself what it cannot hold."""
        if gpu is None:
            options.cache_bytes = self.on_host()
            _check(options, model)
        elif self.share is None:
            options.cache_bytes = self.bytes
        else:
            options.cache_share = self.share


def _bytes(value: object) -> int:
    try:
        return parse_bytes("cache_memory", value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error} or a share like '90%'") from None


def _check(options: _C.EngineOptions, model: _C.Model) -> None:
    """Refuses a cache that this machine cannot hold, before the kernel has to."""
    size, name = options.cache_bytes, "cache_memory"
    if options.cache_pages:
        name = "cache_pages"
        size = options.cache_pages * sum(group.page_bytes for group in model.groups)
    if size > physical_memory():
        raise InvalidRequest(
            f"{name} asks for {size} bytes, expected at most this machine's {physical_memory()}"
        )
