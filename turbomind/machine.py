"""Cores and memory that this process may use, and sizes given as texts."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from turbomind import _C
from turbomind.params import wrong

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def physical_cores() -> int:
    """Counts the physical cores in the affinity mask, at most the quota of CPU time.

    The quota is the smallest of the process's control groups and those above them (cgroup v1 and
    v2), rounded down: of 1.6 CPUs one thread, because threads beyond it wait for each other.
    """
    here = len(cores())
    return max(1, min(here, _C.cpu_quota("/") or here))


def cores() -> list[frozenset[int]]:
    """Returns the CPUs of each physical core in the affinity mask, in numerical order."""
    usable = os.sched_getaffinity(0)
    found: dict[str, set[int]] = {}
    for cpu in sorted(usable):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            name = siblings.read_text().strip()
        except OSError:
            name = str(cpu)
        found.setdefault(name, set()).add(cpu)
    return [frozenset(cpus) for cpus in found.values()]


def physical_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can allocate without swapping.

    It is the smallest of MemAvailable, of what is left below each limit of the process's control
    groups and those above them (cgroup v1 and v2), and below its own limits (`ulimit -v`, `-d`).

    Args:
        root: The folder of `proc` and `sys`, for tests.
    """
    available = physical_memory()
    with contextlib.suppress(OSError, ValueError, KeyError):  # no /proc
        available = 1024 * int(_table(root / "proc/meminfo")["MemAvailable:"])
    return min([available, *_left_in_groups(root), *_left_of_limits(root)])


def _left_of_limits(root: Path) -> Iterator[int]:
    """Yields what is left of the limits of this process's address space and data."""
    for limit, used in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most = resource.getrlimit(limit)[0]
        with contextlib.suppress(OSError, ValueError, KeyError):  # no /proc
            if most != resource.RLIM_INFINITY:
                yield max(0, most - 1024 * int(_table(root / "proc/self/status")[used]))


def _left_in_groups(root: Path) -> Iterator[int]:
    for folder, version in _C.control_groups("memory", str(root)):
        yield from _left_in_group(Path(folder), *(_V1 if version == 1 else _V2))


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


def _left_in_group(group: Path, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Yields what is left below the limit of a control group.

    Pages of files can be dropped, the active ones too: those of weights that were read twice are
    active, also after the process that read them has ended.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or "max"
        most, used = (int((group / name).read_text()) for name in (limit, usage))
        pages = _table(group / "memory.stat")
        files = (int(pages[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        yield max(0, most - used + sum(files))


def _table(path: Path) -> dict[str, str]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def parse_share(name: str, value: object) -> float | None:
    """Returns 0.9 for a text like "90%", and None for a value without a percent sign."""
    if not isinstance(value, str) or "%" not in value:
        return None
    match = _SHARE.fullmatch(value)
    share = float(match[1]) / 100 if match else 0
    if not 0 < share <= 1:
        raise wrong(name, value, "a share above 0% and up to 100%")
    return share


def parse_bytes(name: str, value: object, others: str = "") -> int:
    """Returns the bytes of an int or a text like "2GiB", "512MiB", "1.5GB".

    Args:
        name: The option.
        value: Its value.
        others: What else it may be, for the message.

    Raises:
        InvalidRequest: The value is neither; the message names the option `name`.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):
        size = operator.index(value)
        if 0 < size < 1 << 62:
            return size
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].upper() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
        if 0 < size < 1 << 62:
            return size
    raise wrong(name, value, f"bytes as an int or a text like '2GiB'{others}")
