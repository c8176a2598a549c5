"""SHA-256 of whole weight files, computed once and remembered in a JSON file.

The file is {"version": 1, "files": {absolute path: {size, mtime_ns, inode, sha256}}}. Damaged
entries are ignored and written again; if the file cannot be written, digests are computed each
time. Two processes may use one file: each replaces it whole, so at worst an entry is lost and
computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError
from turbomind.machine import physical_memory

VERSION = 1
BUFFER = 4 << 20  # bytes read at once
MAX_ENTRIES = 4096  # files; the oldest entry is dropped first
# A file may change again within its clock's tick without a newer mtime, so what was written less
# than this many nanoseconds ago is not remembered.
TICK_NS = 100_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def full_digest(files: Iterable[tuple[Path, os.stat_result]], memory: Path) -> str:
    """Returns the digest of all bytes of a model's weight files, in order of file name.

    Args:
        files: Each path with the result of fstat() when it was opened for loading.
        memory: The JSON file that caches digests.

    Returns:
        "sha256 " and 64 hexadecimal digits; a digest of samples has no such prefix.

    Raises:
        ModelError: A file has changed since it was opened, or cannot be read.
    """
    remembered = DigestMemory(memory)
    total = hashlib.sha256()
    for path, opened in sorted(files, key=lambda file: file[0].name):
        total.update(bytes.fromhex(remembered.digest(path, opened)))
    return f"sha256 {total.hexdigest()}"


class DigestMemory:
    """A cache of digests in the JSON file at `path`, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def digest(self, path: Path, opened: os.stat_result) -> str:
        """Returns the SHA-256 (hex) of a file, cached by path, size, mtime and inode."""
        key = os.path.abspath(path)
        facts = _facts(opened)
        known = self._read().get(key)
        if known is not None and known == {**facts, "sha256": known["sha256"]}:
            return str(known["sha256"])
        settled = time.time_ns() - opened.st_mtime_ns > TICK_NS
        digest = _hash_file(path, opened)
        if settled:
            self._remember(key, {**facts, "sha256": digest})
        return digest

    def _read(self) -> dict[str, dict[str, Any]]:
        """Returns the valid entries."""
        try:
            value = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(value, dict) or value.get("version") != VERSION:
            return {}
        files = value.get("files")
        return {k: v for k, v in files.items() if _good(v)} if isinstance(files, dict) else {}

    def _remember(self, key: str, entry: dict[str, Any]) -> None:
        files = self._read()  # again: another process may have written meanwhile
        files.pop(key, None)
        files[key] = entry
        latest = dict(list(files.items())[-MAX_ENTRIES:])
        text = json.dumps({"version": VERSION, "files": latest}, indent=1)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.path, text.encode())


def _facts(stat: os.stat_result) -> dict[str, Any]:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _good(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"size", "mtime_ns", "inode", "sha256"}
        and all(type(entry[name]) is int for name in ("size", "mtime_ns", "inode"))
        and isinstance(entry["sha256"], str)
        and _SHA256.fullmatch(entry["sha256"]) is not None
    )


def _check_same(path: Path, opened: os.stat_result, now: os.stat_result) -> None:
    """Raises ModelError unless the file is the one that was opened and mapped."""
    if _facts(opened) != _facts(now):
        raise ModelError(
            f"{path} changed while it was loaded: it is {_facts(now)}, expected {_facts(opened)}"
        )


def _hash_file(path: Path, opened: os.stat_result) -> str:
    """Hashes a file. It stays in the system's page cache if it fits, for loading reads it next."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER))
    try:
        with path.open("rb", buffering=0) as file:
            _check_same(path, opened, os.fstat(file.fileno()))
            drop = opened.st_size > physical_memory() // 4
            done = 0
            _advise(file.fileno(), 0, "POSIX_FADV_SEQUENTIAL")
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                if drop:
                    _advise(file.fileno(), done, "POSIX_FADV_DONTNEED")
            _check_same(path, opened, os.fstat(file.fileno()))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _advise(descriptor: int, length: int, advice: str) -> None:
    os.posix_fadvise(descriptor, 0, length, getattr(os, advice))


def _replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically; it is readable by its owner only."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
