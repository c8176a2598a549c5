"""Sources of kernels: their hashes, the programs that check them, and their records."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from .settings import ROOT

RECORDS = ROOT / "benchmarks" / "gpu"
STATUS = RECORDS / "STATUS.md"
MARK = "checked in emulation only"  # in README.md while not every kernel has a record

# Programs under cpp/tests that check a file's kernels; with "--gpu" on a real GPU.
CHECKED_BY = {
    "cpp/cache/page_copy_cuda.cu": ("cuda_page_copy_test",),
    "cpp/ceilings/ceilings_cuda.cu": ("gpu_bench",),
    "cpp/cuda/probe_cuda.cu": ("cuda_small_ops_test",),  # opening a GPU runs it
    "cpp/ops/attention_decode_cuda.cu": ("cuda_attention_test",),
    "cpp/ops/attention_prefill_cuda.cu": ("cuda_attention_test",),
    "cpp/ops/embedding_cuda.cu": ("cuda_small_ops_test",),
    "cpp/ops/gate_cuda.cu": ("cuda_small_ops_test",),
    "cpp/ops/logprobs_cuda.cu": ("cuda_logprobs_test",),
    "cpp/ops/next_tokens_cuda.cu": ("cuda_next_tokens_test",),
    "cpp/ops/norm_cuda.cu": ("cuda_small_ops_test",),
    "cpp/ops/rank_sum_cuda.cu": ("cuda_rank_sum_test", "cuda_rank_waits_test"),
    "cpp/ops/rope_kv_cuda.cu": ("cuda_rope_test",),
    "cpp/ops/routing_cuda.cu": ("cuda_experts_test",),
    "cpp/ops/rows_cuda.cu": ("cuda_small_ops_test",),
    "cpp/ops/sample_cuda.cu": ("cuda_sample_test",),
    "cpp/linear/gemm_cuda.cu": ("cuda_linear_test", "cuda_experts_test"),
    "cpp/linear/linear_cuda.cu": ("cuda_linear_test", "cuda_cublaslt_test", "cuda_experts_test"),
}

# Programs that check whole models.
MORE = ("cuda_model_test", "cuda_overlap_test", "cuda_ranks_test")

NOT_COMPILED = {"cuda/kernel_emulated.h"}  # by nvcc
# Host files that launch every kernel, and those that choose the algorithm of a folder's products.
LAUNCHERS = "cpp/cuda/toolkit/*.[ch]*"
LIBRARIES = {"cpp/linear/": "cpp/cuda/cublaslt.cc"}
_TABLE = re.compile(r"^const \w+ (k\w+Cuda)\b", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def drivers() -> list[str]:
    """Lists the programs that check kernels and whole models."""
    return sorted({name for names in CHECKED_BY.values() for name in names} | {*MORE})


def kernel_files() -> list[str]:
    """Lists every file of kernels, relative to the root of the tree."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("cpp/*/*_cuda.cu"))


def planners_of(kernel: str, headers: set[str]) -> set[str]:
    """Lists the host files that decide how a file's kernels are launched: grids, tiles, buffers.

    They are the files that call its table of functions (TM_GPU_TABLE), those beside its headers
    `*_cuda.h`, the launcher, and for products cuBLASLt's.
    """
    found = {name for folder, name in LIBRARIES.items() if kernel.startswith(folder)}
    found |= {name[:-1] + "cc" for name in headers if name.endswith("_cuda.h")}
    found |= {str(path.relative_to(ROOT)) for path in ROOT.glob(LAUNCHERS)}
    tables = _TABLE.findall((ROOT / kernel).read_text(encoding="utf-8"))
    for path in ROOT.glob("cpp/**/*.cc") if tables else ():
        name = str(path.relative_to(ROOT))
        if name.startswith("cpp/tests/"):
            continue
        text = path.read_text(encoding="utf-8")
        if any(re.search(rf"\bTM_GPU_TABLE\(\w+, {table},", text) for table in tables):
            found.add(name)
    return {name for name in found if (ROOT / name).is_file()}


def sources_of(kernel: str) -> list[str]:
    """Lists the file, all headers of cpp/ that it includes, directly or not, and its planners."""
    found: set[str] = set()
    waiting = [kernel]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        text = (ROOT / name).read_text(encoding="utf-8")
        for included in _INCLUDE.findall(text):
            if included not in NOT_COMPILED and (ROOT / "cpp" / included).is_file():
                waiting.append(f"cpp/{included}")
    return sorted(found | planners_of(kernel, found))


def source_hash(kernel: str) -> str:
    """Returns the SHA-256 of a file of kernels, all its headers and its planners."""
    total = hashlib.sha256()
    for name in sources_of(kernel):
        data = (ROOT / name).read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def kernel_table(passed: dict[str, bool]) -> dict[str, Any]:
    """Returns the table of kernels of a record; drivers missing in `passed` did not run."""
    table = {}
    for name in kernel_files():
        by = CHECKED_BY.get(name, ())
        table[name] = {
            "sha256": source_hash(name),
            "checked_by": list(by),
            "passed": bool(by) and all(passed.get(driver, False) for driver in by),
        }
    return table


def read_records(folder: Path = RECORDS) -> dict[str, dict[str, Any]]:
    """Returns all records of a folder by file name, without the schema."""
    paths = sorted(path for path in folder.glob("*.json") if path.name != "schema.json")
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def unchecked(records: dict[str, dict[str, Any]]) -> list[str]:
    """Lists kernels whose present source passed in no record of a real GPU."""
    passed = {
        (name, kernel["sha256"])
        for record in records.values()
        if record["what"] == "check" and not record["emulated"]
        for name, kernel in record["kernels"].items()
        if kernel["passed"]
    }
    return [name for name in kernel_files() if (name, source_hash(name)) not in passed]


def status_text(records: dict[str, dict[str, Any]]) -> str:
    """Returns the text of STATUS.md."""
    missing = unchecked(records)
    lines = ["# Kernels without a passing record", ""]
    if not any(not record["emulated"] for record in records.values()):
        lines += ["No kernel has a record: nothing was run on a GPU yet.", ""]
    elif missing:
        lines += ["Their source has changed since it last passed on a GPU, or it never did.", ""]
    else:
        lines += ["None: every kernel has passed on a GPU as it is.", ""]
    lines += [f"- `{name}`" for name in missing]
    if missing:
        lines += [""]
    lines += ["Written by `python tools/gpu_check.py --status`; a test compares it.", ""]
    return "\n".join(lines)
