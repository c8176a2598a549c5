"""Phase `environment`: the GPU, its state, and the installed software."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from .settings import Settings
from .shell import find_program, run

# Their names in nvidia-smi.
GPU_FIELDS = (
    "name", "driver_version", "compute_cap", "memory.total", "memory.free", "power.limit",
    "power.draw", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu",
    "ecc.mode.current", "mig.mode.current", "compute_mode", "pstate",
)  # fmt: skip
PACKAGES = ("torch", "numpy", "pytest", "pybind11", "cmake", "ninja", "transformers", "triton")


def run_phase(settings: Settings) -> dict[str, Any]:
    """Collects facts for readers of the figures; no other phase depends on them."""
    return {
        "gpu": gpu_facts(),
        "toolkit": toolkit_facts(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def gpu_facts() -> dict[str, str]:
    """Queries nvidia-smi for the first GPU, one field at a time if it refuses one."""
    program = find_program("nvidia-smi")
    if program is None:
        return {"error": "nvidia-smi is not there"}
    done = run(
        [program, "-i", "0", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"], 15
    )
    values = [part.strip() for part in done.output.strip().split(",")]
    if done.ok and len(values) == len(GPU_FIELDS):
        return dict(zip(GPU_FIELDS, values, strict=True))
    facts = {"error": done.tail.strip()}
    for name in ("name", "driver_version", "memory.total"):
        done = run([program, "-i", "0", f"--query-gpu={name}", "--format=csv,noheader"], 5)
        if done.ok:
            facts[name] = done.output.strip()
    return facts


NO_DEVICE = 100  # the driver's code on a machine without a GPU


def no_gpu() -> str:
    """Returns why there is no GPU, or "". Unclear cases return "", and the phases report them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no GPU: {error}"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == NO_DEVICE or (code == 0 and count.value == 0):
        return "no GPU: the driver has found none"
    return ""


def free_gpu_bytes() -> int | None:
    """Returns the value for the first GPU, or None if nvidia-smi has none."""
    program = find_program("nvidia-smi")
    if program is None:
        return None
    query = "--query-gpu=memory.free"
    done = run([program, "-i", "0", query, "--format=csv,noheader,nounits"], 15)
    try:
        return int(done.output.strip()) << 20
    except ValueError:
        return None


def toolkit_facts() -> dict[str, str]:
    """Returns versions of the compilers."""
    facts = {}
    for name in ("nvcc", "cmake", "ninja", "c++", "compute-sanitizer"):
        program = find_program(name)
        if program is None:
            facts[name] = "not there"
            continue
        lines = [line for line in run([program, "--version"], 10).output.splitlines() if line]
        release = [line for line in lines if "release" in line]
        facts[name] = f"{name}: {(release or lines or ['?'])[0].strip()}"
    return facts


def cpu_name() -> str:
    """Returns the processor's name as Linux reports it, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def commit_name() -> str:
    """Returns the checked-out commit, with "+" if files differ from it; "unknown" without git."""
    program = find_program("git")
    if program is None:
        return "unknown"
    here = Path(__file__).parent
    head = run([program, "rev-parse", "--short=12", "HEAD"], 10, cwd=here)
    if not head.ok:
        return "unknown"
    changed = run([program, "status", "--porcelain", "--untracked-files=no"], 10, cwd=here)
    return head.output.strip() + ("+" if changed.output.strip() else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not there"
