"""Measures ceilings and an engine: times, and the bytes and FLOPs of the work."""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from turbomind import _C, Engine, Generation, Stream
from turbomind.config import facts
from turbomind.config.device import device_name, library_folders, ranks_by_gpu

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
HASHED_TOKENS = 32
REPEATS, REPEAT_SECONDS = 3, 0.4
READ_BUFFER = (256 << 20, 2 << 30)  # least and most bytes: larger than caches, smaller than memory
PRODUCT = 8192  # rows and columns of the matrices that a GPU multiplies
EMULATED = (1 << 18, 64, 0.01)  # bytes, rows and columns, seconds: only a functional check


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of a device."""

    device: str
    """Name of the device, as `Engine.device` has it."""
    name: str
    """Name of the processor or the GPU."""
    isa: str | None
    threads: int | None
    read: float
    """Bytes per second of a stream that is only read (on the CPU with 2 MiB pages)."""
    copy: float | None
    """Bytes per second, read and written, of a copied stream; measured on a GPU only."""
    tiles: float
    """FLOPs per second of register-only products; on a GPU, of a large bfloat16 product."""
    int8: float | None = None
    """Operations per second of register-only products of bytes, which bound quantized weights;
    measured on the CPU only."""


def cpu_ceilings(isa: str, threads: int, buffer_bytes: int) -> Ceilings:
    """Measures reads of a buffer of the size of the weights, and products in registers.

    The maximum of REPEATS measurements counts, since disturbances only slow them down.
    """
    size = _buffer_size(buffer_bytes)
    return Ceilings(
        device="cpu",
        name=_C.cpu_name(),
        isa=isa,
        threads=threads,
        read=max(_C.measure_read(isa, threads, size, REPEAT_SECONDS) for _ in range(REPEATS)),
        copy=None,
        tiles=max(_C.measure_tiles(isa, threads, REPEAT_SECONDS) for _ in range(REPEATS)),
        int8=max(_C.measure_int8(isa, threads, REPEAT_SECONDS) for _ in range(REPEATS)),
    )


def gpu_ceilings(gpus: Sequence[_C.GpuOptions], buffer_bytes: int) -> Ceilings:
    """Measures streams over each GPU's memory, and large products with cuBLASLt if available.

    GPUs are measured one after the other, and what they reach is added up.
    """
    names = {(device.kind, device.index): device.name for device in _C.gpu_devices()}
    distinct = [gpu for gpu, _ in ranks_by_gpu(gpus)]
    size, rows, seconds = _buffer_size(buffer_bytes), PRODUCT, REPEAT_SECONDS
    if gpus[0].kind == "emulated":
        size, rows, seconds = EMULATED
    rates = [
        _C.measure_gpu(
            _C.GpuOptions(gpu.kind, gpu.index, False, library_folders()), size, rows, seconds
        )
        for gpu in distinct
    ]
    return Ceilings(
        device=device_name(gpus),
        name=", ".join(names[gpu.kind, gpu.index] for gpu in distinct),
        isa=None,
        threads=None,
        read=sum(rate.read for rate in rates),
        copy=sum(rate.copy for rate in rates),
        tiles=sum(rate.flops for rate in rates),
    )


def _buffer_size(wanted: int) -> int:
    return min(max(wanted, READ_BUFFER[0]), READ_BUFFER[1])


def first_token(ask: Callable[[], Stream]) -> tuple[float, Generation]:
    """Returns the seconds of a request for one token, and its result.

    Args:
        ask: Submits the request.
    """
    begin = time.perf_counter()
    done = ask().result()
    return time.perf_counter() - begin, done


@dataclass(frozen=True)
class Prefill:
    """Prefill of a prompt of `tokens`, alone on the engine. Rates are medians."""

    tokens: int
    seconds: float
    tokens_per_second: float
    flops: int
    flops_per_second: float
    of_tiles: float


@dataclass(frozen=True)
class Decode:
    """Decode of `batch` sequences after `context` tokens each. Rates are medians."""

    batch: int
    context: int
    step_seconds: float
    tokens_per_second: float
    weight_bytes: int
    kv_bytes: int
    bytes_per_second: float
    of_read: float
    weights_of_read: float
    """Fraction of the read ceiling, counting the weights only."""
    flops: int


def tail_tokens(batch: int, steps: int) -> int:
    """Returns the tokens after the context that a decode round may need.

    A sequence decodes an extra step for each sequence that joins later, and two steps of each
    sequence are not timed.
    """
    return steps + batch + 3


class Bench:
    """Measures an idle engine.

    Each prompt has new random tokens and starts with an empty prefix cache.
    """

    def __init__(self, engine: Engine, ceilings: Ceilings) -> None:
        self.engine = engine
        self.info = engine.info
        self.model = engine.info.description
        self.ceilings = ceilings
        self._random = np.random.default_rng(0)

    def prompt(self, tokens: int) -> list[int]:
        """Returns random token ids."""
        ids: list[int] = self._random.integers(0, self.model.vocab, tokens).tolist()
        return ids

    def prefill(self, tokens: int, repeat: int) -> Prefill:
        """Returns the median of `repeat` prompts, after one warm-up."""
        times = []
        for _ in range(repeat + 1):
            ids = self.prompt(tokens)
            self.engine.evict()
            with self.engine.open() as handle:
                handle.append(ids)
                seconds, _ = first_token(partial(handle.generate, max_new_tokens=1, **GREEDY))
                times.append(seconds)
        seconds = statistics.median(times[1:])
        flops = facts.prefill_flops(self.model, tokens)
        return Prefill(
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            flops=flops,
            flops_per_second=flops / seconds,
            of_tiles=flops / seconds / self.ceilings.tiles,
        )

    def decode(self, batch: int, context: int, steps: int, repeat: int) -> Decode:
        """Returns the median over `repeat` rounds of the median step time."""
        seconds = statistics.median(
            self._decode_round(batch, context, steps) for _ in range(repeat)
        )
        middle = context + steps // 2
        weights = self.info.step_weight_bytes(batch)
        kv = batch * facts.kv_read_bytes(self.model, self.info.kv_dtype, middle)
        return Decode(
            batch=batch,
            context=context,
            step_seconds=seconds,
            tokens_per_second=batch / seconds,
            weight_bytes=weights,
            kv_bytes=kv,
            bytes_per_second=(weights + kv) / seconds,
            of_read=(weights + kv) / seconds / self.ceilings.read,
            weights_of_read=weights / seconds / self.ceilings.read,
            flops=batch * facts.decode_flops(self.model, middle),
        )

    def _decode_round(self, batch: int, context: int, steps: int, profile: bool = False) -> float:
        """Returns the median time between tokens while all sequences decode, in seconds.

        `profile` starts the profiler after the prefill.
        """
        self.engine.evict()
        handles = [self.engine.open() for _ in range(batch)]
        try:
            for handle in handles:  # prefill first, so that only decoding is timed
                handle.append(self.prompt(context))
                handle.generate(max_new_tokens=1, **GREEDY).result()
            if profile:
                self.engine.profile(True)
            # The last sequence is timed; the others get enough tokens to decode until it ends.
            longest = tail_tokens(batch, steps) - 1
            others = [h.generate(max_new_tokens=longest, **GREEDY) for h in handles[:-1]]
            times = []
            for event in handles[-1].generate(max_new_tokens=steps + 2, **GREEDY):
                if event.error is not None:
                    raise event.error
                if event.token_ids:
                    times.append(event.seconds)
            for stream in others:
                stream.result()
        finally:
            for handle in handles:
                handle.close()
        # The first interval is left out: its step may include the admission of a sequence.
        return statistics.median(b - a for a, b in itertools.pairwise(times[1:]))

    def profile(self, batch: int, context: int, prefill: int) -> dict[str, list[dict[str, Any]]]:
        """Profiles a prefill and a decode round; returns the time of each op."""
        tables = {}
        self.engine.profile(True)
        self.prefill(prefill, repeat=1)
        tables["prefill"] = self._ops()
        self._decode_round(batch, context, steps=8, profile=True)
        tables["decode"] = self._ops()
        self.engine.profile(False)
        return tables

    def _ops(self) -> list[dict[str, Any]]:
        rows = [
            {
                "op": name,
                "calls": stat["calls"],
                "seconds": stat["ns"] / 1e9,
                "bytes": stat["bytes"],
                "flops": stat["flops"],
            }
            for name, stat in self.engine.stats().ops.items()
            if stat["calls"]
        ]
        return sorted(rows, key=lambda row: -row["seconds"])

    def logits_hash(self) -> str:
        """Returns the first 16 hex digits of SHA-256 over the float32 logits of fixed tokens.

        Equal builds, ISAs and weights give equal hashes; a change of the arithmetic changes them.
        """
        ids = np.random.default_rng(1).integers(0, self.model.vocab, HASHED_TOKENS).tolist()
        return hashlib.sha256(self.engine.logits(ids).tobytes()).hexdigest()[:16]
