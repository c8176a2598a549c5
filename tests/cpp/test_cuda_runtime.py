"""The calls of the real GPU's side to the CUDA runtime, checked by a fake runtime that keeps books
(cpp/tests/cuda/fake_cuda_runtime.h)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from assets import ROOT

SOURCES = (
    "cpp/tests/cuda/cuda_runtime_test.cc",
    "cpp/cuda/toolkit/cuda_gpu.cc",
    "cpp/cuda/toolkit/launcher.cc",
    "cpp/cuda/gpu_switches.cc",
    "cpp/cuda/kernel_name.cc",
    "cpp/cuda/launch_delay.cc",
)


def toolkit_headers() -> Path | None:
    """The folder of the toolkit's headers, if there is one."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        roots.insert(0, str(Path(nvcc).resolve().parents[1]))
    folders = [Path(root) / "include" for root in roots if root]
    return next((f for f in folders if (f / "cuda_runtime_api.h").is_file()), None)


def test_books_of_the_runtime(tmp_path):
    headers = toolkit_headers()
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if headers is None or compiler is None:
        pytest.skip("needs a C++ compiler and the headers of the CUDA toolkit")
    options = ["-std=c++20", "-O0", "-pthread", "-I", str(ROOT / "cpp"), "-isystem", str(headers)]
    program = tmp_path / "cuda_runtime_test"
    command = [compiler, *options, *(str(ROOT / source) for source in SOURCES), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("passed\n", 0)
