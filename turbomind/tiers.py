"""Keys and values below the device: what is where, and how fast it comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import turbomind._C as _C
from turbomind.errors import InvalidRequest
from turbomind.machine import parse_bytes, physical_memory

KEY_BYTES = 16  # of a page's key


@dataclass(frozen=True)
class Residence:
    """Tokens of the longest beginning whose keys and values can be had from the device; from the
    host's memory or above; from the disk or above. A tier that there is not says what the one above
    it says."""

    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class TierStats:
    """A tier's pages. `bytes` are in use, of at most `quota` (0: no limit). `damaged` were torn,
    foreign or changed when they were read, and are forgotten; `write_errors` found the disk full or
    not to be written."""

    pages: int
    bytes: int
    quota: int
    reads: int
    writes: int
    evicted: int
    damaged: int
    write_errors: int


@dataclass(frozen=True)
class Flushed:
    """How a flush ended; true when every page that was to be saved is below.

    `ended`: all saves and removals asked for before have come to their end; else the time has
    passed, or the engine was closed. `unsaved`: keys of the pages that were to be saved at any time
    before, could not be (a full disk, a quota, too little memory to hold them until their turn
    came), are not below by now and not removed. They are computed again when they are needed."""

    ended: bool
    unsaved: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return self.ended and not self.unsaved


def warn_of_last_saves(ended: bool, unsaved: int, stuck: bool) -> None:
    """Logs what an engine's last saves could not do; they are computed again."""
    log = logging.getLogger(__name__)
    if stuck:
        log.warning("a tier of pages does not answer (a disk that hangs?) and was left behind")
    elif not ended:
        log.warning("the engine was closed before all pages were saved: its time was over")
    if unsaved:
        log.warning("%d pages could not be saved (is the disk or its quota full?)", unsaved)


class Tiers:
    """The tiers an engine was opened with: their options, and their names by place."""

    def __init__(
        self,
        options: _C.EngineOptions,
        host_memory: int | str | None,
        page_folder: str | os.PathLike[str] | None,
        disk_quota: int | str | None,
    ) -> None:
        self.names: list[str] = []
        if host_memory is not None:
            options.host_bytes = parse_bytes("host_memory", host_memory)
            if options.host_bytes > physical_memory():
                raise InvalidRequest(
                    f"host_memory asks for {options.host_bytes} bytes, expected at most this "
                    f"machine's {physical_memory()}"
                )
            self.names.append("host")
        if page_folder is not None:
            options.page_folder = _folder(page_folder)
            self.names.append("disk")
        if disk_quota is not None:
            if page_folder is None:
                raise InvalidRequest(f"disk_quota is {disk_quota!r}, expected a page_folder too")
            options.disk_quota = parse_bytes("disk_quota", disk_quota)

    def residence(self, found: tuple[int, list[int]]) -> Residence:
        """The core's answer by name."""
        device, below = found
        tokens = dict(zip(self.names, below, strict=True))
        host = tokens.get("host", device)
        return Residence(device, host, tokens.get("disk", host))

    def stats(self, found: Iterable[Mapping[str, Any]]) -> dict[str, TierStats]:
        """The core's counters by name."""
        return {name: TierStats(**values) for name, values in zip(self.names, found, strict=True)}

    def speeds(self, found: tuple[list[float], float, int]) -> dict[str, float]:
        """The core's measurements by name."""
        reads, prefill, kv_bytes = found
        speeds = {f"{name}_read": speed for name, speed in zip(self.names, reads, strict=True)}
        return {
            "host_read": 0.0,
            "disk_read": 0.0,
            **speeds,
            "prefill": prefill,
            "kv_bytes_per_token": float(kv_bytes),
        }


def key_list(keys: Iterable[bytes] | bytes | str) -> list[bytes]:
    """Page keys as a list; InvalidRequest for what is none."""
    if isinstance(keys, bytes | str):
        raise InvalidRequest("keys is a single value, expected a list of page keys")
    out = list(keys)
    for i, key in enumerate(out):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidRequest(f"keys[{i}] is {key!r}, expected {KEY_BYTES} bytes")
    return out


def _folder(value: str | os.PathLike[str]) -> str:
    try:
        path = os.fspath(value)
    except TypeError as error:
        raise InvalidRequest(f"page_folder is {value!r}, expected a path") from error
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest(f"page_folder is {value!r}, expected a path")
    return path
