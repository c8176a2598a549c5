"""Phase `build`: the extension and the programs that check and time kernels, for this GPU alone."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from .kernels import drivers
from .machine import gpu_facts
from .settings import ROOT, Settings
from .shell import Done, run

LIMIT = 230.0  # seconds of all steps together
# Files that the phases import and pytest reads; they are copied, and the checkout is not changed.
PACKAGE = ("turbomind", "lmchat", "cli", "tests", "conftest.py", "pyproject.toml")
# Only the best instruction set of this machine is built, in a third of the time.
ISAS = (
    ("amx", {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}),
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
    ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("avx2", {"avx2", "fma", "f16c"}),
)
ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\S+)' for '(?P<arch>\w+)'\n"
    r".*Function properties for (?P=kernel)\n"
    r"\s*(?P<frame>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r"(?:\n.*?Used (?P<registers>\d+) registers)?"
)


def run_phase(settings: Settings) -> dict[str, Any]:
    """Builds the package and programs, and reports what exists even if a part fails to build.

    Without the extension the programs are still built and run, and the other way round.
    """
    if settings.drivers != settings.build:
        return {"note": "built before"}
    end = time.monotonic() + LIMIT
    build, work = Path(settings.build), Path(settings.work)
    result: dict[str, Any] = {"options": options(), "error": ""}
    with_extension = _configure(build, work, result, end, python=True)
    if not with_extension:
        result["error"] = f"without the extension: {result['configure'][-1000:]}"
        if not _configure(build, work, result, end, python=False):
            raise RuntimeError(result["configure"])
    targets = [*drivers(), *(["_C"] if with_extension else [])]
    done = _build(build, targets, work / "build.log", end)
    result["seconds"] = round(done.seconds, 1)
    result["warnings"] = done.output.count("warning")
    if not done.ok:
        result["error"] += f"{done.status}: {done.last_line}"
        result["log"] = done.tail
    result["built"] = [name for name in drivers() if (build / name).exists()]
    result["extension"] = copy_package(build, Path(settings.package))
    result["kernels"] = compiler_reports(build / "cuda")
    return result


def options() -> list[str]:
    """Returns CMake options: this GPU's architecture and this processor's instruction set."""
    found = gpu_facts().get("compute_cap", "9.0")
    number = found.replace(".", "") if re.fullmatch(r"\d+\.\d", found) else "90"
    arch = {"90": "90a-real"}.get(number, f"{number}-real")
    return ["-DTM_CUDA=ON", f"-DTM_CUDA_ARCHS={arch}", f"-DTM_ISAS={best_isa()}"]


def best_isa() -> str:
    """Returns the highest instruction set that the processor reports; "" for all."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return next((name for name, needs in ISAS if needs <= has), "")


def _configure(
    build: Path, work: Path, result: dict[str, Any], end: float, *, python: bool
) -> bool:
    command = [
        "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DTM_BUILD_TESTS=ON", f"-DTM_BUILD_PYTHON={'ON' if python else 'OFF'}",
        f"-DPython_EXECUTABLE={sys.executable}", *options(),
    ]  # fmt: skip
    if python:
        try:
            import pybind11
        except ImportError as error:
            result["configure"] = str(error)
            return False
        command.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    done = run(command, end - time.monotonic(), log=work / "configure.log")
    result["configure"] = done.tail
    return done.ok


def _build(build: Path, targets: list[str], log: Path, end: float) -> Done:
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["cmake", "--build", str(build), "--parallel", jobs, "--target", *targets]
    # Targets that do not depend on a failed part are built too.
    return run([*command, "--", "-k", "0"], end - time.monotonic(), log=log)


def copy_package(build: Path, package: Path) -> str:
    """Copies the Python files and the extension. Returns the path of the extension, or ""."""
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "stress")
    for name in PACKAGE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, package / name, ignore=skipped, dirs_exist_ok=True)
        else:
            package.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, package / name)
    extension = build / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not extension.exists():
        return ""
    shutil.copy2(extension, package / "turbomind" / extension.name)
    return str(package / "turbomind" / extension.name)


def compiler_reports(folder: Path) -> list[dict[str, Any]]:
    """Reads ptxas' report of each kernel: registers, stack frame and spilled bytes."""
    found = []
    for path in sorted(folder.glob("*_cuda.ptxas")):
        for entry in ENTRY.finditer(path.read_text()):
            found.append(
                {
                    "kernel": entry["kernel"],
                    "arch": entry["arch"],
                    "registers": int(entry["registers"] or 0),
                    "stack_frame": int(entry["frame"]),
                    "spilled": int(entry["stores"]) + int(entry["loads"]),
                }
            )
    return found
