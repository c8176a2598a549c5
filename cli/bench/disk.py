"""The disk of a folder: dropping files from the OS page cache, read bandwidth, fsync time."""

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

from lmchat.store.temporary import temporary_folder
from turbomind.errors import InvalidRequest

READ_BYTES = 1 << 20  # size of one read, as in the bound of a restored session
PROBE_BYTES = (64 << 20, 1 << 30)  # least and most bytes of a bandwidth measurement
COMMIT_BYTES = 4096  # written before each timed fsync
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Dropped:
    """Files dropped from the OS page cache.

    Attributes:
        bytes: Size of the files.
        resident_bytes: Bytes that are still cached; None if the system does not report it.
    """

    bytes: int
    resident_bytes: int | None

    @property
    def verified(self) -> bool:
        """Returns whether at most 1 % of the bytes is known to be still cached."""
        return self.resident_bytes is not None and self.resident_bytes <= self.bytes // 100


def drop_files(folder: Path) -> Dropped:
    """Syncs all files in `folder` and drops them from the OS page cache."""
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
        os.fsync(file.fileno())  # DONTNEED does not drop dirty pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_files(folder: Path) -> None:
    """Reads all files in `folder` into the OS page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(READ_BYTES):
                    pass


def resident_bytes(path: Path) -> int | None:
    """Returns the cached bytes of a file, by mincore(2); None if that is not supported."""
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
    cached = int((pages & 1).sum())
    return min(cached * mmap.PAGESIZE, size)


def resident_share(folder: Path) -> float:
    """Returns the fraction of the bytes of all files in `folder` that is known to be cached."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return sum(resident_bytes(path) or 0 for path in files) / max(size, 1)


class ReadProbe:
    """Measures the read bandwidth with a file that is dropped and read in pieces of READ_BYTES.

    Args:
        folder: Where the file is written.
        size: Size of the file in bytes, limited by PROBE_BYTES.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = min(max(size, PROBE_BYTES[0]), PROBE_BYTES[1]) // READ_BYTES * READ_BYTES
        self._path = folder / "read-probe"
        random = np.random.default_rng(0)  # incompressible, since file systems may compress
        with self._path.open("wb") as file:
            for _ in range(self.size // READ_BYTES):
                file.write(random.bytes(READ_BYTES))

    def measure(self) -> tuple[float, bool]:
        """Returns the bytes per second of serial reads, and whether the file was dropped."""
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
    """Returns the seconds of `count` fsyncs, each after appending COMMIT_BYTES to a file."""
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
    """Returns the type of the file system of `folder`, such as "ext4"; "" if unknown."""
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
    """A context with an empty temporary folder in `folder` (None: where other such files are)."""
    check_folder(folder)
    parent = temporary_folder() if folder is None else folder
    try:
        place = Path(tempfile.mkdtemp(prefix="lmchat-bench-", dir=parent))
    except OSError as error:
        raise InvalidRequest(f"--folder is {folder!r}, expected one to write in: {error}") from None
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def disk_facts(folder: Path) -> dict[str, object]:
    """Returns the facts about the disk of a measurement."""
    kind = filesystem(folder)
    return {"folder": str(folder.parent), "filesystem": kind, "in_memory": kind in IN_MEMORY}


def disk_note(facts: dict[str, object]) -> str:
    """Returns the facts as a text."""
    note = f"{facts['folder']} ({facts['filesystem'] or 'unknown file system'})"
    if facts["in_memory"]:
        note += ": files there are in memory, not on a disk; choose another folder with --folder"
    return note
