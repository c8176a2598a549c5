"""Where a model computes: the CPU, a GPU, or a GPU's kernels run by the host."""

from __future__ import annotations

import re
import site
import sysconfig
from pathlib import Path

from turbomind import _C
from turbomind.errors import InvalidRequest

_CUDA = re.compile(r"cuda(?::(\d{1,4}))?")
# Of the wheels that bring cuBLASLt, below a folder of packages.
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")


def gpu_options(device: object, deterministic: object) -> _C.GpuOptions | None:
    """What `device` asks for; None is the CPU.

    "auto" is the CPU until a GPU has been checked; "cuda" and "cuda:1" are GPUs; "cuda_emulated"
    runs the GPU's kernels on the host, thousands of times slower, for tests. Raises InvalidRequest
    for anything else.
    """
    if not isinstance(deterministic, bool):
        raise InvalidRequest(f"deterministic is {deterministic!r}, expected True or False")
    if not isinstance(device, str):
        raise InvalidRequest(f"device is {device!r}, expected a text")
    if device in ("auto", "cpu"):
        return None
    if device == "cuda_emulated":
        return _C.GpuOptions("emulated", 0, deterministic, [])
    match = _CUDA.fullmatch(device)
    if match is None:
        raise InvalidRequest(
            f"device is {device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:' and a number"
        )
    status = _C.cuda_status()
    if status.startswith("no CUDA"):
        raise InvalidRequest(f"device is {device!r}: {status}")
    return _C.GpuOptions("cuda", int(match.group(1) or 0), deterministic, library_folders())


def library_folders() -> list[str]:
    """Folders of installed wheels that may hold cuBLASLt."""
    packages = dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages()])
    folders = [Path(root) / name for root in packages for name in _WHEEL_FOLDERS]
    return [str(folder) for folder in folders if folder.is_dir()]
