"""Default values of engine options for each device, and shares of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import turbomind._C as _C
from turbomind.machine import available_memory, parse_bytes, parse_share, physical_memory
from turbomind.params import wrong


@dataclass(frozen=True)
class Defaults:
    """Default values of engine options on one device.

    Attributes:
        cache_memory: Memory of the KV cache, in bytes or as a share.
        cache_limit: Largest share of the free memory that it is. None: no limit.
        prefill_chunk: Most prompt tokens of one step.
        step_ms: Target duration of a step that generates a token, in milliseconds.
        warm_up: The engine runs steps before the first request.
    """

    cache_memory: str
    cache_limit: float | None
    prefill_chunk: int
    step_ms: float
    warm_up: bool


CPU = Defaults("2GiB", 0.8, 512, 100.0, warm_up=True)
GPU = Defaults("90%", None, 2048, 25.0, warm_up=True)
# Its memory is host memory of a made-up size, and its first steps are as fast as later ones.
EMULATED = replace(GPU, cache_memory="64MiB", warm_up=False)


def defaults(gpus: Sequence[_C.GpuOptions]) -> Defaults:
    """Returns the defaults of GPUs, or for none of them those of the CPU."""
    if not gpus:
        return CPU
    return EMULATED if gpus[0].kind == "emulated" else GPU


class CacheSize:
    """A value of `cache_memory`: bytes, or a share of the memory free after the model is loaded.

    Args:
        value: As the user gives it; None: the default.
        absent: The defaults of the device. They also limit a size that the user did not give.
    """

    def __init__(self, value: int | str | None, absent: Defaults = CPU) -> None:
        self._limit = absent.cache_limit if value is None else None
        value = absent.cache_memory if value is None else value
        self.share = parse_share("cache_memory", value)
        self.bytes = (
            0
            if self.share is not None
            else parse_bytes("cache_memory", value, " or a share like '90%'")
        )

    def of(self, free: int) -> int:
        """Returns the bytes of the cache where `free` bytes are free."""
        if self.share is not None:
            return int(self.share * max(0, free))
        return self.bytes if self._limit is None else min(self.bytes, int(self._limit * free))

    def on_host(self, needed: int = 0) -> int:
        """Returns the bytes on the CPU; `needed` is what else will be allocated."""
        return self.of(max(0, available_memory() - needed))

    def set(
        self,
        options: _C.EngineOptions,
        model: _C.Model,
        gpus: Sequence[_C.GpuOptions],
        needed: int = 0,
    ) -> None:
        """Sets the engine's options for a model that is loaded.

        Args:
            options: The options.
            model: The model.
            gpus: The GPUs; none: the CPU.
            needed: The bytes that else will be allocated on the CPU.

        Raises:
            InvalidRequest: On the CPU, the cache is larger than this machine's memory. The engine
                checks the memory of a GPU itself.
        """
        if not gpus:
            options.cache_bytes = self.on_host(needed)
            _check(options, model)
        elif self.share is None:
            options.cache_bytes = self.bytes
        else:
            options.cache_share = self.share


def pool_sizes(
    groups: list[_C.CacheGroup], options: _C.EngineOptions, cache_bytes: int = 0
) -> list[int]:
    """Returns how many pages each cache group of an engine gets.

    Args:
        groups: The cache groups of the model.
        options: The engine's options.
        cache_bytes: The memory of the pages, unless the options have `cache_pages`.
    """
    return _C.pool_sizes(
        groups,
        bytes=cache_bytes,
        pages=options.cache_pages,
        rows=options.max_batch_size,
        chunk=options.prefill_chunk,
    )


def pool_bytes(groups: list[_C.CacheGroup], options: _C.EngineOptions) -> int:
    """Returns the bytes of all pages of an engine whose options have `cache_pages`."""
    sizes = pool_sizes(groups, options)
    return sum(n * group.page_bytes for n, group in zip(sizes, groups, strict=True))


def _check(options: _C.EngineOptions, model: _C.Model) -> None:
    """Raises InvalidRequest for a cache that this machine cannot hold."""
    size, name = options.cache_bytes, "cache_memory"
    if options.cache_pages:
        name = "cache_pages"
        size = pool_bytes(model.groups, options)
    if size > physical_memory():
        expected = f"at most this machine's {physical_memory()} bytes"
        raise wrong(name, size, expected, seen=f"{size} bytes")
