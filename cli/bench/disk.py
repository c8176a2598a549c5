"""The disk under a folder: taking files out of the page cache, read bandwidth, fsync time."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turbomind.errors import InvalidRequest

READ_BYTES = 1 << 20  # of one read, as the bound of a restored session states it
PROBE_BYTES = (64 << 20, 1 << 30)  # least and most that a bandwidth is measured on
COMMIT_BYTES = 4096  # written before each timed fsync
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Dropped:
    """Files that were taken out of the page cache. `resident_bytes` of their `bytes` are still in
    it; None: this system does not tell."""

    bytes: int
    resident_bytes: int | None

    @property
    def verified(self) -> bool:
        """Whether it is known that nearly all of them left: at most 1 % stayed."""
        return self.resident_bytes is not None and self.resident_bytes <= self.bytes // 100


def drop_files(folder: Path) -> Dropped:
    """Writes all files below `folder` out and asks the kernel to forget what it has of them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        _drop(path)
    resident = [resident_bytes(path) for path in files]
    known = [size for size in resident if size is not None]
    return Dropped(
        sum(path.stat().st_size for path in files),
        sum(known) if len(known) == len(resident) else None,
    )


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # DONTNEED leaves what is not written yet
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_files(folder: Path) -> None:
    """Reads all files below `folder`, so that the page cache has them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(READ_BYTES):
                    pass


def resident_bytes(path: Path) -> int | None:
    """Bytes of a file that are in the page cache, by mincore(2); None where it cannot be asked."""
    size = path.stat().st_size
    if size == 0:
        return 0
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except AttributeError:
        return None
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
        address = np.frombuffer(view, np.uint8).ctypes.data
        if (
            mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
            )
            != 0
        ):
            return None
    there = int((pages & 1).sum())
    return min(there * mmap.PAGESIZE, size)


def resident_share(folder: Path) -> float:
    """The share of the bytes of all files below `folder` that is known to be in the page cache."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return sum(resident_bytes(path) or 0 for path in files) / max(size, 1)


class ReadProbe:
    """A file of its own in `folder` that is dropped and read again in pieces of READ_BYTES."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = min(max(size, PROBE_BYTES[0]), PROBE_BYTES[1]) // READ_BYTES * READ_BYTES
        self._path = folder / "read-probe"
        random = np.random.default_rng(0)  # what can be compressed would not come from the disk
        with self._path.open("wb") as file:
            for _ in range(self.size // READ_BYTES):
                file.write(random.bytes(READ_BYTES))

    def measure(self) -> tuple[float, bool]:
        """Bytes per second, one read after the other, and whether the file was known to be out of
        the page cache."""
        _drop(self._path)
        resident = resident_bytes(self._path)
        dropped = Dropped(self.size, resident)
        buffer = bytearray(READ_BYTES)
        with self._path.open("rb", buffering=0) as file:
            begin = time.perf_counter()
            while file.readinto(buffer):
                pass
            seconds = time.perf_counter() - begin
        return self.size / seconds, dropped.verified


def fsync_seconds(folder: Path, count: int) -> list[float]:
    """Seconds of `count` fsyncs, each after COMMIT_BYTES were appended to a file in `folder`."""
    path = folder / "fsync-probe"
    found = []
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(b"x" * COMMIT_BYTES)
            begin = time.perf_counter()
            os.fsync(file.fileno())
            found.append(time.perf_counter() - begin)
    path.unlink()
    return found


def filesystem(folder: Path) -> str:
    """The type of the file system that `folder` is on, such as "ext4"; "" where unknown."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    resolved, best, kind = folder.resolve(), "", ""
    for line in lines:
        _, point, name, *_ = line.split()
        place = point.encode().decode("unicode_escape")  # a blank is written as \040
        if len(place) >= len(best) and resolved.is_relative_to(place):
            best, kind = place, name
    return kind


def check_folder(folder: str | None) -> None:
    """Raises InvalidRequest unless it is None or a folder."""
    if folder is not None and not Path(folder).is_dir():
        raise InvalidRequest(f"--folder is {folder!r}, expected a folder that exists")


@contextmanager
def scratch(folder: str | None) -> Iterator[Path]:
    """An empty folder in `folder` (None: the system's for temporary files), removed at the end."""
    check_folder(folder)
    try:
        place = Path(tempfile.mkdtemp(prefix="lmchat-bench-", dir=folder))
    except OSError as error:
        raise InvalidRequest(f"--folder is {folder!r}, expected one to write in: {error}") from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def disk_facts(folder: Path) -> dict[str, object]:
    """Which disk a figure is of."""
    kind = filesystem(folder)
    return {"folder": str(folder.parent), "filesystem": kind, "in_memory": kind in IN_MEMORY}


def disk_note(facts: dict[str, object]) -> str:
    """The same in words, for under a table."""
    note = f"{facts['folder']} ({facts['filesystem'] or 'unknown file system'})"
    if facts["in_memory"]:
        note += ": files there are in memory, not on a disk; choose another folder with --folder"
    return note
