"""The device that the suite runs on (`pytest --device`), and the precision to expect of it.

Import it only after conftest.py has read the options.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import turbomind
from turbomind.device import DEVICE_VARIABLE

DEVICE = os.environ[DEVICE_VARIABLE]
ON_GPU = DEVICE != "cpu"
# Options of an engine whose results are compared with those of another library.
EXACT: dict[str, Any] = {} if ON_GPU else {"dtype": "float32"}
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
