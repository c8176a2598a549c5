"""Phase `ops`: every kernel against loops in double precision and the CPU's ops, and whole models.

The programs under cpp/tests make random inputs for each seed and fill outputs with NaN first.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .bench import library_folders
from .kernels import drivers, kernel_table
from .settings import Settings, write_json
from .shell import find_program, run

SECONDS = 60.0  # time limit of one run of one program
# Take folders that may hold cuBLASLt.
WITH_LIBRARY = ("cuda_cublaslt_test", "cuda_model_test", "cuda_overlap_test")
TOOLS = ("memcheck", "racecheck", "synccheck")
REFUSED = "Device not supported"  # message of compute-sanitizer in some sandboxes


def command_of(settings: Settings, driver: str, seed: int) -> list[str]:
    """Returns the command by which a program checks its kernels on this run's device."""
    command = [str(Path(settings.drivers) / driver)]
    if driver == "gpu_bench":
        command += ["--what", "ceilings", "--quick"]
    else:
        command += ["--seed", str(seed)]
    if not settings.emulated:
        command.append("--gpu")
        if driver in WITH_LIBRARY:
            command += library_folders()
    return command


def run_phase(settings: Settings) -> dict[str, Any]:
    """Runs several programs at once, for most of their time is the reference on the CPU."""
    jobs = 1 if settings.tiny else max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    runs: list[dict[str, Any]] = []

    def check(driver: str, seed: int) -> dict[str, Any]:
        done = run(command_of(settings, driver, seed), SECONDS)
        facts = {"driver": driver, "seed": seed, "status": done.status}
        if not done.ok:
            facts |= {"code": done.code, "tail": done.tail}
        return facts | {"seconds": round(done.seconds, 2)}

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [
            pool.submit(check, driver, seed) for seed in settings.seeds for driver in drivers()
        ]
        for each in as_completed(waiting):
            runs.append(each.result())
            write_json(settings.result_path("ops"), _result(settings, runs))
    return _result(settings, runs)


def _result(settings: Settings, runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = sorted({each["driver"] for each in runs if each["status"] != "ok"})
    passed = {}
    for driver in drivers():
        seeds = [each["seed"] for each in runs if each["driver"] == driver]
        passed[driver] = driver not in failed and sorted(seeds) == sorted(settings.seeds)
    return {
        "runs": sorted(runs, key=lambda each: (each["driver"], each["seed"])),
        "kernels": kernel_table(passed),
        "error": f"failed: {', '.join(failed)}" if failed else "",
    }


def run_sanitizer(settings: Settings) -> dict[str, Any]:
    """Phase `sanitizer`: runs the same kernels on tiny shapes under NVIDIA's compute-sanitizer."""
    program = find_program("compute-sanitizer")
    if settings.emulated:
        return {"not_available": "the emulator finds such errors itself"}
    if program is None:
        return {"not_available": "compute-sanitizer is not there"}
    bench = [str(Path(settings.drivers) / "gpu_bench"), "--gpu", "--quick"]
    found: dict[str, Any] = {}
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", *bench]
        done = run(command, 40, log=Path(settings.work) / f"{tool}.log")
        if not done.ok and REFUSED in done.output:
            return {"not_available": f"compute-sanitizer: {REFUSED}"}
        found[tool] = {"status": done.status, "seconds": round(done.seconds, 1)}
        if not done.ok:
            found[tool] |= {"code": done.code, "tail": done.tail}
        write_json(settings.result_path("sanitizer"), {"tools": found})
    bad = [tool for tool, facts in found.items() if facts["status"] != "ok"]
    return {"tools": found, "error": f"not ok: {', '.join(bad)}" if bad else ""}
