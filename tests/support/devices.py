"""The device that the suite runs on (`pytest --device`), the precision to expect of it, and GPUs
that a machine seems to have.

Import it only after conftest.py has read the options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import turbomind
from turbomind import _C
from turbomind.config import device
from turbomind.config.device import DETERMINISTIC_VARIABLE, DEVICE_VARIABLE, TP_VARIABLE

DEVICE = os.environ[DEVICE_VARIABLE]
ON_GPU = DEVICE != "cpu"
# Options of an engine whose results are compared with those of another library.
EXACT: dict[str, Any] = {} if ON_GPU else {"dtype": "float32"}
# A test that must look while a step is computed.
WATCHED_STEPS = pytest.mark.skipif(
    DEVICE.startswith("cuda") and "emulated" not in DEVICE, reason="a GPU's steps are too short"
)
FLOAT32 = pytest.param("float32", marks=pytest.mark.cpu_only("a GPU has no float32"))
FLOAT16_KV = pytest.param(
    "float16", marks=pytest.mark.cpu_only("on a GPU KV has the type of the weights")
)


def isas() -> list[str]:
    """Returns the instruction sets to test: all that run here, or a GPU's own kernels."""
    if ON_GPU:
        return ["auto"]
    here = turbomind.available_isas()
    # amx_emulated computes as AMX does, without its instructions.
    return [*here, "amx_emulated"] if "avx512_bf16" in here else here


def another_machine() -> dict[str, Any]:
    """Returns options of an engine whose pages are usable here but not bit-identical."""
    best = turbomind._C.resolve_isa("auto")
    if ON_GPU:
        return {"device": "cpu", "dtype": "bfloat16"}
    return {"device": "cpu", "isa": "portable" if best != "portable" else "avx2"}


def rms(values: npt.ArrayLike) -> float:
    """Returns the root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


class FakeGpus:
    """Replaces what `_C` reports of the machine's GPUs, and lists those whose kernels are tried.

    Args:
        status: As `_C.cuda_status()` returns it: "2 CUDA devices", "no CUDA device: no driver".
        fault: Why they do not work, of all GPUs or by number.
    """

    def __init__(self, status: str, fault: str | Mapping[int, str] = "") -> None:
        self.status, self.fault = status, fault
        self.tried: list[int] = []
        found = re.match("[0-9]+", status)
        self.count = int(found[0]) if found else 0
        self._emulated = [gpu for gpu in _C.gpu_devices() if gpu.kind == "emulated"]

    def gpu_fault(self, index: int) -> str:
        """Replaces `_C.gpu_fault()`."""
        assert 0 <= index < self.count
        self.tried.append(index)
        return self.fault if isinstance(self.fault, str) else self.fault.get(index, "")

    def gpu_devices(self) -> list[object]:
        """Replaces `_C.gpu_devices()`."""
        facts: dict[str, object] = {"kind": "cuda", "name": "a GPU", "total_bytes": 80 << 30}
        facts |= {"multiprocessors": 100, "compute_capability": (9, 0)}
        real = [SimpleNamespace(index=index, **facts) for index in range(self.count)]
        return [*real, *self._emulated]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the functions, until the test ends, and removes what names a device."""
        for name in (DEVICE_VARIABLE, DETERMINISTIC_VARIABLE, TP_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(_C, "cuda_status", lambda: self.status)
        monkeypatch.setattr(_C, "gpu_fault", self.gpu_fault)
        monkeypatch.setattr(_C, "gpu_devices", self.gpu_devices)
        device._tried.cache_clear()
