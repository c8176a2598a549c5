"""The choice of devices: the CPU, a GPU for each rank, or a GPU's kernels emulated by the host."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import turbomind._C as _C
from turbomind.params import integer, wrong

if TYPE_CHECKING:
    from turbomind.loading.loader import ModelInfo

DEVICE_VARIABLE = "TURBOMIND_DEVICE"
TP_VARIABLE = "TURBOMIND_TP"
_MAX_TP = (1 << 31) - 1  # of the core; the model allows fewer
MAX_GPUS = 16  # of one model
# With their defaults; cpp/cuda/gpu_switches.h.
SWITCH_VARIABLES = {"TM_CUDA_OVERLAP": "1", "TM_CUDA_GRAPHS": "1", "TM_CUDA_RANK_WAITS": "0"}
DETERMINISTIC_VARIABLE = "TURBOMIND_DETERMINISTIC"
_log = logging.getLogger(__name__)
_GPUS = re.compile(r"(cuda|cuda_emulated)(?::([0-9]{1,4}(?:,[0-9]{1,4})*))?")
_SWITCH = {"": False, "0": False, "1": True}
# Folders of cuBLASLt inside a folder of packages, as its wheels install it.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")


def gpu_options(
    device: object = "auto",
    deterministic: object = None,
    *,
    isa: object = "auto",
    dtype: object = "auto",
    kv_dtype: object = "auto",
    tp: object = None,
) -> list[_C.GpuOptions]:
    """Resolves the `device` option.

    Args:
        device: "cpu"; "cuda", the first GPU, with `tp` the first `tp` ones; "cuda:1", that GPU;
            "cuda:0,1", the GPU of each rank in their order, all different, or for checks all the
            same; "cuda_emulated", "cuda_emulated:0,1", the GPUs' kernels on the host, thousands of
            times slower, for tests; or "auto". "auto" is $TURBOMIND_DEVICE if set; else the CPU if
            `isa` or float32 is asked for by name; else "cuda" if `gpu_fault()` finds that the GPUs
            work; else the CPU.
        deterministic: Uses only batch-invariant kernels. None: $TURBOMIND_DETERMINISTIC, 0 (the
            default) or 1.
        isa: The engine's option.
        dtype: The engine's option.
        kv_dtype: The engine's option.
        tp: The engine's option.

    Returns:
        Options of the GPU of each rank; none for the CPU.

    Raises:
        InvalidRequest: An argument or variable has another value, there is no such GPU, or `tp` is
            another number than that of the GPUs.
    """
    exact = _deterministic(deterministic)
    _check_switches()
    ranks = rank_count(tp, device)
    device, source = named_device(device, isa=isa, dtype=dtype, kv_dtype=kv_dtype)
    if device == "auto":
        device = "cpu" if gpu_fault(ranks) else "cuda"
    return _options(device, source, exact, ranks)


def rank_count(tp: object = None, device: object = "auto") -> int:
    """Returns the ranks that a model is cut over: `tp`, or for None $TURBOMIND_TP, else the number
    of GPUs that `device` or for "auto" $TURBOMIND_DEVICE lists, else 1.

    Raises:
        InvalidRequest: It is not an integer of 1 or more, or not the number of the listed GPUs, or
            the device has no known form.
    """
    device, source = _named(device)
    listed = len(_parse(device, source)[1])
    if tp is not None:
        ranks, asked = integer("tp", tp, 1, _MAX_TP), "tp"
    elif named := os.environ.get(TP_VARIABLE, ""):
        asked = f"the environment variable {TP_VARIABLE}"
        if not named.isascii() or not named.isdigit() or not 1 <= int(named[:11]) <= _MAX_TP:
            raise wrong(asked, named, "an integer of 1 or more")
        ranks = int(named)
    else:
        return listed or 1
    if listed and ranks != listed:
        raise wrong(asked, ranks, f"{listed}, the number of GPUs: {source} is {device!r}")
    return ranks


def named_device(
    device: object = "auto",
    *,
    isa: object = "auto",
    dtype: object = "auto",
    kv_dtype: object = "auto",
) -> tuple[object, str]:
    """Returns the device that the options of `gpu_options()` or $TURBOMIND_DEVICE name, and which
    of them does. "auto" is left where GPUs are taken if they work; they are not used to see."""
    device, source = _named(device)
    if device == "auto" and (isa != "auto" or "float32" in (dtype, kv_dtype)):
        return "cpu", source
    return device, source


def is_automatic(device: object) -> bool:
    """Returns whether no device is named, so that the CPU may replace a GPU."""
    return _named(device)[0] == "auto"


def device_name(gpus: Sequence[_C.GpuOptions]) -> str:
    """Returns the name of a device: "cpu", "cuda:0", "cuda:0,1", "cuda_emulated"."""
    if not gpus:
        return "cpu"
    listed = ",".join(str(gpu.index) for gpu in gpus)
    if gpus[0].kind == "cuda":
        return f"cuda:{listed}"
    return "cuda_emulated" if listed == "0" else f"cuda_emulated:{listed}"


def gpu_note(gpu: _C.GpuOptions, gpus: Sequence[_C.GpuOptions]) -> str:
    """Returns " on cuda:1", to name a GPU of several; an empty text for the only one."""
    kind = "cuda" if gpu.kind == "cuda" else "cuda_emulated"
    return f" on {kind}:{gpu.index}" if len(gpus) > 1 else ""


def gpu_fault(ranks: int = 1) -> str:
    """Returns why "auto" does not take a GPU for each rank, or an empty text if they work.

    The reason is "no CUDA device: ...", too few of them, or the error of a kernel. The call starts
    the driver, so it is made only for an engine or `lmchat info`. It runs a kernel on the first
    `ranks` GPUs once per process, and logs a warning where there are GPUs that "auto" cannot take.
    """
    status = _C.cuda_status()  # differs in a forked process, so it is not cached
    return status if _is_missing(status) else _tried(status, ranks)


def ranks_by_gpu(gpus: Sequence[_C.GpuOptions]) -> list[tuple[_C.GpuOptions, list[int]]]:
    """Returns each GPU once, with the ranks that are on it."""
    found: dict[tuple[str, int], tuple[_C.GpuOptions, list[int]]] = {}
    for rank, gpu in enumerate(gpus):
        found.setdefault((gpu.kind, gpu.index), (gpu, []))[1].append(rank)
    return list(found.values())


def model_fault(info: ModelInfo, gpus: Sequence[_C.GpuOptions]) -> str:
    """Returns why GPUs cannot run a model, from its configs; an empty text if nothing is known.

    The check compares the weights with each GPU's whole memory; loading checks the free memory.

    Raises:
        InvalidRequest: The model cannot be cut over so many ranks.
    """
    core = info.to_core()
    _C.plan_cache(core, len(gpus), True)  # refuses what cannot be cut
    if fault := _C.model_fault(core, gpus):
        return fault
    weights = info.rank_weight_bytes
    totals = {(d.kind, d.index): d.total_bytes for d in _C.gpu_devices()}
    for gpu, ranks in ranks_by_gpu(gpus):
        needed, total = sum(weights[rank] for rank in ranks), totals[gpu.kind, gpu.index]
        if needed >= total:
            where, formats = gpu_note(gpu, gpus), info.weights_text
            return f"the weights{where} need {needed} bytes as {formats}, it has {total}"
    return ""


@functools.cache
def _tried(status: str, ranks: int) -> str:
    if ranks > _count("cuda"):
        _log.warning("%s, but tp is %d, so the CPU computes", status, ranks)
        return f"{status}, expected {ranks} or more: tp is {ranks}"
    for index in range(ranks):
        if fault := _C.gpu_fault(index):
            _log.warning(
                "%s, but cuda:%d does not work, so the CPU computes: %s", status, index, fault
            )
            return fault if ranks == 1 else f"cuda:{index}: {fault}"
    return ""


def library_folders() -> list[str]:
    """Lists folders that may hold cuBLASLt: those of wheels, then those of CUDA toolkits.

    Wheels are looked for in all folders of packages, toolkits in $CUDA_HOME, $CUDA_PATH and
    /usr/local/cuda."""
    packages = dict.fromkeys([sysconfig.get_path("purelib"), *filter(None, sys.path)])
    folders = [Path(root) / name for root in packages for name in _WHEEL_FOLDERS]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(root) / "lib64" for root in dict.fromkeys(toolkits) if root]
    return [str(folder) for folder in folders if folder.is_dir()]


def _named(device: object) -> tuple[object, str]:
    """Returns the device that the option or $TURBOMIND_DEVICE names, and which of them does."""
    if device != "auto":
        return device, "device"
    named = os.environ.get(DEVICE_VARIABLE) or "auto"
    return named, "device" if named == "auto" else f"the environment variable {DEVICE_VARIABLE}"


def _parse(device: object, source: str) -> tuple[str, list[int]]:
    """Returns "auto", "cpu", "cuda" or "cuda_emulated", and the GPUs that a device lists."""
    if not isinstance(device, str):
        raise wrong(source, device, "a string")
    if device in ("auto", "cpu"):
        return device, []
    match = _GPUS.fullmatch(device)
    if match is None:
        expected = "'auto', 'cpu', 'cuda' or 'cuda:' and numbers with commas between them"
        raise wrong(source, device, expected)
    listed = [int(number) for number in match[2].split(",")] if match[2] else []
    if len(listed) > MAX_GPUS:
        seen = f"{device!r}, {len(listed)} GPUs"
        raise wrong(source, device, f"at most {MAX_GPUS}", seen=seen)
    if listed and len(set(listed)) not in (1, len(listed)):
        raise wrong(source, device, "GPUs that all differ, or one for all ranks")
    return match[1], listed


def _options(device: object, source: str, deterministic: bool, ranks: int) -> list[_C.GpuOptions]:
    name, listed = _parse(device, source)
    if name == "cpu":
        return []
    folders, kind = [], "emulated"
    if name == "cuda":
        if _is_missing(status := _C.cuda_status()):
            raise wrong(source, device, f"another device: {status}")
        folders, kind = library_folders(), "cuda"
    count = _count(kind)
    if max(listed, default=0) >= count:
        raise wrong(source, device, f"GPUs from 0 to {count - 1}")
    if not listed and ranks > (most := min(count, MAX_GPUS)):
        raise wrong("tp", ranks, f"at most {most}, the GPUs of {source} {device!r}")
    return [_C.GpuOptions(kind, index, deterministic, folders) for index in listed or range(ranks)]


def _count(kind: str) -> int:
    return sum(gpu.kind == kind for gpu in _C.gpu_devices())


def _check_switches() -> None:
    """Refuses values that the core would refuse too, but after which "auto" would take the CPU."""
    for name, default in SWITCH_VARIABLES.items():
        if (value := os.environ.get(name, "")) not in _SWITCH:
            expected = f"0 (off) or 1 (on); the default is {default}"
            raise wrong(f"the environment variable {name}", value, expected)


def _is_missing(status: str) -> bool:
    return status.startswith("no CUDA")


def _deterministic(value: object) -> bool:
    if value is None:
        named = os.environ.get(DETERMINISTIC_VARIABLE, "")
        if named not in _SWITCH:
            raise wrong(f"the environment variable {DETERMINISTIC_VARIABLE}", named, "0 or 1")
        return _SWITCH[named]
    if not isinstance(value, bool):
        raise wrong("deterministic", value, "True, False or None")
    return value
