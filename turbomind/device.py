"""The choice of a device: the CPU, a GPU, or a GPU's kernels emulated by the host."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import turbomind._C as _C
from turbomind.errors import InvalidRequest
from turbomind.params import integer

if TYPE_CHECKING:
    from turbomind.loading.loader import ModelInfo

DEVICE_VARIABLE = "TURBOMIND_DEVICE"
TP_VARIABLE = "TURBOMIND_TP"
_MAX_TP = (1 << 31) - 1  # of the core; the model allows fewer
SWITCH_VARIABLES = ("TM_CUDA_OVERLAP", "TM_CUDA_GRAPHS")  # cpp/cuda/gpu_switches.h
DETERMINISTIC_VARIABLE = "TURBOMIND_DETERMINISTIC"
_log = logging.getLogger(__name__)
_CUDA = re.compile(r"cuda(?::(\d{1,4}))?")
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
    tp: int = 1,
) -> _C.GpuOptions | None:
    """Resolves the `device` option.

    Args:
        device: "cpu"; "cuda" or "cuda:1", a GPU; "cuda_emulated", the GPU's kernels on the host,
            thousands of times slower, for tests; or "auto". "auto" is $TURBOMIND_DEVICE if set;
            else the CPU if `isa` or float32 is asked for by name or `tp` is above 1; else "cuda"
            if `gpu_fault()` finds a GPU that works; else the CPU.
        deterministic: Uses only batch-invariant kernels. None: $TURBOMIND_DETERMINISTIC, 0 (the
            default) or 1.
        isa: The engine's option.
        dtype: The engine's option.
        kv_dtype: The engine's option.
        tp: The ranks, from `rank_count()`.

    Returns:
        Options of a GPU; None is the CPU.

    Raises:
        InvalidRequest: An argument or variable has another value, there is no such GPU, or a GPU is
            named for several ranks.
    """
    exact = _deterministic(deterministic)
    _check_switches()
    device, source = named_device(device, isa=isa, dtype=dtype, kv_dtype=kv_dtype, tp=tp)
    if device == "auto":
        device = "cpu" if gpu_fault() else "cuda"
    gpu = _options(device, source, exact)
    if gpu is not None and tp > 1:
        raise InvalidRequest(f"tp is {tp}, expected 1 on a GPU: {source} is {device!r}")
    return gpu


def rank_count(tp: object = None) -> int:
    """Returns the ranks that a model is cut over: `tp`, or for None $TURBOMIND_TP, else 1.

    Raises:
        InvalidRequest: It is not an integer of 1 or more.
    """
    if tp is not None:
        return integer("tp", tp, 1, _MAX_TP)
    named = os.environ.get(TP_VARIABLE, "")
    if not named:
        return 1
    if not named.isascii() or not named.isdigit() or not 1 <= int(named[:11]) <= _MAX_TP:
        raise InvalidRequest(
            f"the environment variable {TP_VARIABLE} is {named!r}, expected an integer of 1 or more"
        )
    return int(named)


def named_device(
    device: object = "auto",
    *,
    isa: object = "auto",
    dtype: object = "auto",
    kv_dtype: object = "auto",
    tp: int = 1,
) -> tuple[object, str]:
    """Returns the device that the options of `gpu_options()` or $TURBOMIND_DEVICE name, and which
    of them does. "auto" is left where a GPU is taken if it works; the GPU is not used to see."""
    if device != "auto":
        return device, "device"
    named = os.environ.get(DEVICE_VARIABLE) or "auto"
    if named != "auto":
        return named, f"the environment variable {DEVICE_VARIABLE}"
    on_cpu = isa != "auto" or "float32" in (dtype, kv_dtype) or tp > 1
    return "cpu" if on_cpu else "auto", "device"


def is_automatic(device: object) -> bool:
    """Returns whether no device is named, so that the CPU may replace a GPU."""
    return device == "auto" and os.environ.get(DEVICE_VARIABLE, "") in ("", "auto")


def device_name(gpu: _C.GpuOptions | None) -> str:
    """Returns the name of a device: "cpu", "cuda:0" or "cuda_emulated"."""
    if gpu is None:
        return "cpu"
    return f"cuda:{gpu.index}" if gpu.kind == "cuda" else "cuda_emulated"


def gpu_fault() -> str:
    """Returns why "auto" does not take the first GPU, or an empty text if the GPU works.

    The reason is "no CUDA device: ..." or the error of a kernel. The call starts the driver, so it
    is made only for an engine or `lmchat info`. It runs a kernel once per process, and logs a
    warning for a GPU that does not work.
    """
    status = _C.cuda_status()  # differs in a forked process, so it is not cached
    return status if _is_missing(status) else _tried(status)


def model_fault(info: ModelInfo, gpu: _C.GpuOptions) -> str:
    """Returns why a GPU cannot run a model, from its configs; an empty text if nothing is known.

    The check compares the weights with the GPU's whole memory; loading checks the free memory."""
    fault = _C.model_fault(info.to_core(), [gpu])
    if fault:
        return fault
    devices = (d for d in _C.gpu_devices() if (d.kind, d.index) == (gpu.kind, gpu.index))
    total = next(devices).total_bytes
    if info.weight_bytes < total:
        return ""
    return f"the weights need {info.weight_bytes} bytes as {info.weights_text}, it has {total}"


@functools.cache
def _tried(status: str) -> str:
    fault = _C.gpu_fault(0)
    if fault:
        _log.warning("%s, but the first one does not work, so the CPU computes: %s", status, fault)
    return fault


def library_folders() -> list[str]:
    """Lists folders that may hold cuBLASLt: those of wheels, then those of CUDA toolkits.

    Wheels are looked for in all folders of packages, toolkits in $CUDA_HOME, $CUDA_PATH and
    /usr/local/cuda."""
    packages = dict.fromkeys([sysconfig.get_path("purelib"), *filter(None, sys.path)])
    folders = [Path(root) / name for root in packages for name in _WHEEL_FOLDERS]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(root) / "lib64" for root in dict.fromkeys(toolkits) if root]
    return [str(folder) for folder in folders if folder.is_dir()]


def _options(device: object, source: str, deterministic: bool) -> _C.GpuOptions | None:
    if not isinstance(device, str):
        raise InvalidRequest(f"{source} is {device!r}, expected a string")
    if device == "cpu":
        return None
    if device == "cuda_emulated":
        return _C.GpuOptions("emulated", 0, deterministic, [])
    match = _CUDA.fullmatch(device)
    if match is None:
        raise InvalidRequest(
            f"{source} is {device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:' and a number"
        )
    status = _C.cuda_status()
    if _is_missing(status):
        raise InvalidRequest(f"{source} is {device!r}: {status}")
    return _C.GpuOptions("cuda", int(match.group(1) or 0), deterministic, library_folders())


def _check_switches() -> None:
    """Refuses values that the core would refuse too, but after which "auto" would take the CPU."""
    for name in SWITCH_VARIABLES:
        if (value := os.environ.get(name, "")) not in _SWITCH:
            raise InvalidRequest(
                f'the environment variable {name} is "{value}", '
                "expected 0 (off) or 1 (on, the default)"
            )


def _is_missing(status: str) -> bool:
    return status.startswith("no CUDA")


def _deterministic(value: object) -> bool:
    if value is None:
        named = os.environ.get(DETERMINISTIC_VARIABLE, "")
        if named not in _SWITCH:
            raise InvalidRequest(
                f"the environment variable {DETERMINISTIC_VARIABLE} is {named!r}, expected 0 or 1"
            )
        return _SWITCH[named]
    if not isinstance(value, bool):
        raise InvalidRequest(f"deterministic is {value!r}, expected True, False or None")
    return value
