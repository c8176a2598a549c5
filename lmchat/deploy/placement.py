"""What each replica computes on: cores, a GPU for each rank, and its share of the memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import turbomind._C as _C
from lmchat.bundled import find_model
from lmchat.errors import InvalidRequest
from lmchat.generation.admission import check_queue
from turbomind.config.described import described
from turbomind.config.device import gpu_options, named_device, rank_count
from turbomind.config.engine_options import core_options, thread_count
from turbomind.config.memory_budget import attention_bytes, check_parts, loading_parts, parts_of
from turbomind.engine.tiers import Tiers
from turbomind.loading.loader import check_load_format
from turbomind.loading.quantize import read_quantize
from turbomind.machine import available_memory, cores, physical_cores

LAST_SECONDS = 60.0
"""Time for a replica that ends, after its time to drain: it writes its pages."""
MOST_REPLICAS = 1024
"""Most processes of a deployment."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Place:
    """What one replica computes on.

    Attributes:
        cpus: its CPUs.
        device: the device in words: "GPU 0", "GPU 2,3" or "CPU 0,1".
        visible: its GPUs, as in $CUDA_VISIBLE_DEVICES.
        cache_memory: bytes of its KV cache; None: the option as it is given.
    """

    cpus: frozenset[int]
    device: str
    visible: str | None = None
    cache_memory: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process. Without the first one, modules in the working directory would
        come first."""
        return {"PYTHONSAFEPATH": "1"} | ({_VISIBLE: self.visible} if self.visible else {})

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns its command line without --uds, from that of any replica."""
        cache = [f"--cache-memory={self.cache_memory}"] if self.cache_memory else []
        return [*arguments, *cache]


def places(replicas: int, model: str | None, options: Mapping[str, Any]) -> list[Place]:
    """Returns the place of each replica.

    Args:
        replicas: how many there are.
        model: the model.
        options: the options of the engine that are given.

    Raises:
        InvalidRequest: there are too few GPUs, or too little memory for all replicas together.
    """
    if not 1 <= replicas <= MOST_REPLICAS:
        raise InvalidRequest(f"--replicas is {replicas}, expected 1 to {MOST_REPLICAS}")
    _check(options)
    named = {name: options.get(name, "auto") for name in ("device", "isa", "dtype", "kv_dtype")}
    device = str(named_device(**named)[0])
    parts = split(cores()[: physical_cores()], replicas)
    if gpus := _gpus(device, replicas, rank_count(options.get("tp"), device)):
        return [Place(cpus, f"GPU {gpu}", gpu) for cpus, gpu in zip(parts, gpus, strict=True)]
    memory = None if device.startswith("cuda") else _cache(replicas, model, options)
    is_cpu = device in ("auto", "cpu")
    return [
        Place(cpus, f"CPU {','.join(map(str, sorted(cpus)))}" if is_cpu else device, None, memory)
        for cpus in parts
    ]


def _check(options: Mapping[str, Any]) -> None:
    """Refuses options as the engine of a replica would, which has started by then."""
    check_queue(**{name: options[name] for name in ("max_queue", "max_wait") if name in options})
    core, _ = core_options(options)
    Tiers(core, options.get("host_memory"), None, None)
    thread_count(options.get("threads"))
    read_quantize(*map(options.get, ("quantize", "head", "group_size")))
    check_load_format(options.get("load_format", "auto"))


def split(of: Sequence[frozenset[int]], replicas: int) -> list[frozenset[int]]:
    """Returns the CPUs of each replica: neighbouring cores, which replicas share if there are few.

    Args:
        of: the CPUs of each core.
        replicas: how many replicas there are.
    """
    if replicas >= len(of):
        return [of[n % len(of)] for n in range(replicas)]
    ends = [len(of) * n // replicas for n in range(replicas + 1)]
    return [frozenset().union(*of[a:b]) for a, b in itertools.pairwise(ends)]


def _gpus(device: str, replicas: int, ranks: int) -> list[str]:
    """Returns the GPUs of each replica, one for each rank, as in $CUDA_VISIBLE_DEVICES; none where
    the CPU computes, or where the GPUs' numbers are given."""
    if device.startswith("cuda:") and replicas > 1:
        raise InvalidRequest(f"device is {device!r} for {replicas} replicas, expected 'cuda'")
    if device not in ("auto", "cuda"):
        return []
    if device == "cuda":
        gpu_options(device, tp=ranks)  # raises where there are too few for one
    count = sum(gpu.kind == "cuda" for gpu in _C.gpu_devices())
    if count == 0:
        return []
    if replicas * ranks > count:
        each = f" with tp {ranks}, {replicas * ranks} GPUs" if ranks > 1 else ""
        raise InvalidRequest(
            f"--replicas is {replicas}{each}, expected at most {count}, the number of GPUs; with "
            "--device cpu the CPU computes"
        )
    visible = os.environ.get(_VISIBLE)
    numbers = visible.split(",") if visible else list(map(str, range(count)))
    return [",".join(numbers[n * ranks : (n + 1) * ranks]) for n in range(replicas)]


def _cache(replicas: int, model: str | None, options: Mapping[str, Any]) -> int:
    """Returns the bytes of each replica's KV cache on the CPU, once all replicas fit the memory."""
    core, cache = core_options(options)
    Tiers(core, options.get("host_memory"), None, None)
    info = described(
        find_model(model), options, weights=options.get("load_format", "auto") != "dummy"
    )
    threads = options.get("threads") or -(-physical_cores() // replicas)
    isa = _C.resolve_isa(options.get("isa", "auto"))
    share = available_memory() // replicas
    parts = parts_of(
        info,
        core,
        cache,
        share,
        attention_bytes(info.description, isa, max(threads, info.tp)),
    )
    for needed in (parts, loading_parts(info)):
        check_parts(needed, share, f"that each of {replicas} replicas may use now")
    return next(part.bytes for part in parts if part.name == "KV cache")
