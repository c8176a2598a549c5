"""What each replica computes on: cores, a GPU for each rank, and its share of the memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import turbomind._C as _C
from lmchat.bundled import find_model
from lmchat.errors import InvalidRequest
from lmchat.generation.admission import check_queue
from turbomind.config.device import gpu_options, named_device, rank_count
from turbomind.config.engine_options import ChatEngineOptions, complete
from turbomind.engine.plan import check_host_options, plan
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
    check_host_options(complete(_of_engine(options)))


def _of_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the options that are the engine's; `serve` checks the rest."""
    return {name: options[name] for name in ChatEngineOptions.__annotations__ if name in options}


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
    threads = options.get("threads") or -(-physical_cores() // replicas)
    given = {**_of_engine(options), "device": "cpu", "threads": threads}
    made = replace(plan(find_model(model), **given), available=available_memory() // replicas)
    made.check(f"that each of {replicas} replicas may use now")
    return next(part.bytes for part in made.parts if part.name == "KV cache")
