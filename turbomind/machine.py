"""What this process may use of the machine."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path

from turbomind.errors import InvalidRequest

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def physical_cores() -> int:
    """Physical cores in this process's affinity mask, at most the container's CPU quota."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(1))
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1 << 20


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse_bytes(name: str, value: object) -> int:
    """Bytes from an int or a text like "2GiB", "512MiB", "1.5GB"."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        size = operator.index(value)
        if 0 < size < 1 << 62:
            return size
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
        if 0 < size < 1 << 62:
            return size
    raise InvalidRequest(f"{name} is {value!r}, expected bytes as an int or a text like '2GiB'")
