"""Lower tiers of the KV cache, in host memory and on disk: options, residence, counters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import turbomind._C as _C
from turbomind.machine import parse_bytes, physical_memory
from turbomind.params import wrong

KEY_BYTES = 16  # length of a block hash
AUTO_QUOTA = -1  # a quota of the disk tier that the core chooses


@dataclass(frozen=True)
class Residence:
    """Lengths of the longest prefixes whose KV can be read from each tier, in tokens.

    Without a tier, its value is that of the tier above.

    Attributes:
        device: From the device.
        host: From the device or host memory.
        disk: From the device, host memory or disk.
    """

    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class Forecast:
    """What the next turn of a sequence costs.

    Attributes:
        residence: Where the KV of its tokens is.
        ttft: Predicted seconds to the first token of the turn, if it ran now and alone; 0.0 before
            the first measurement.
    """

    residence: Residence
    ttft: float


@dataclass(frozen=True)
class TierStats:
    """Counters of one lower tier.

    Attributes:
        pages: Pages in the tier.
        bytes: Bytes in use.
        quota: Most bytes; 0 means no limit.
        reads: Pages read since the engine was opened.
        writes: Pages written since the engine was opened.
        evicted: Pages evicted for want of room.
        damaged: Pages found torn, foreign or changed when read; the tier dropped them.
        write_errors: Writes that failed because the disk was full or refused them.
    """

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
    """Result of `Engine.flush_pages()`; true if every posted page is in a lower tier.

    Attributes:
        ended: All saves and removals posted before have ended. False: the time has passed, or the
            engine was closed.
        unsaved: Block hashes of pages that were posted at any time before, could not be saved (a
            full disk, a quota, too little memory to queue them), and were neither saved nor removed
            since. They are computed again when needed.
    """

    ended: bool
    unsaved: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return self.ended and not self.unsaved


def warn_of_last_saves(ended: bool, unsaved: int, stuck: bool) -> None:
    """Logs the pages that a closing engine could not save; they are computed again when needed.

    Args:
        ended: All saves ended in time.
        unsaved: Number of pages not saved.
        stuck: A tier did not answer.
    """
    log = logging.getLogger(__name__)
    if stuck:
        log.warning("a tier of pages does not answer (a disk that hangs?) and was abandoned")
    elif not ended:
        log.warning("the engine was closed before all pages were saved: its time limit had passed")
    if unsaved:
        log.warning("%d pages could not be saved (is the disk or its quota full?)", unsaved)


class Tiers:
    """The lower tiers of an engine: their options, and their names from the highest down."""

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
                expected = f"at most this machine's {physical_memory()} bytes"
                raise wrong("host_memory", host_memory, expected)
            self.names.append("host")
        if page_folder is not None:
            options.page_folder = _folder(page_folder)
            self.names.append("disk")
        options.disk_quota = parse_quota("disk_quota", disk_quota)
        if options.disk_quota > 0 and page_folder is None:
            raise wrong("disk_quota", disk_quota, "a page_folder too")

    def residence(self, found: tuple[int, list[int]]) -> Residence:
        """Converts the core's prefix lengths per tier to names."""
        device, lower = found
        tokens = dict(zip(self.names, lower, strict=True))
        host = tokens.get("host", device)
        return Residence(device, host, tokens.get("disk", host))

    def forecasts(self, found: Iterable[tuple[int, list[int], float]]) -> list[Forecast]:
        """Converts the core's answers to `forecasts()`."""
        return [Forecast(self.residence((device, lower)), ttft) for device, lower, ttft in found]

    def stats(self, found: Iterable[Mapping[str, Any]]) -> dict[str, TierStats]:
        """Converts the core's counters per tier to names."""
        return {name: TierStats(**values) for name, values in zip(self.names, found, strict=True)}

    def speeds(self, found: tuple[list[float], float, int]) -> dict[str, float]:
        """Converts the core's measured speeds to names."""
        reads, prefill, kv_bytes = found
        speeds = {f"{name}_read": speed for name, speed in zip(self.names, reads, strict=True)}
        return {
            "host_read": 0.0,
            "disk_read": 0.0,
            **speeds,
            "prefill": prefill,
            "kv_bytes_per_token": float(kv_bytes),
        }


def parse_quota(name: str, value: object) -> int:
    """Returns a quota as the core takes it.

    Args:
        name: The option, for errors.
        value: Bytes as an int or a text such as "20GiB"; None or "none": no limit; "auto": the core
            chooses one.

    Raises:
        InvalidRequest: The value is none of these.
    """
    if value is None or value == "none":
        return 0
    if value == "auto":
        return AUTO_QUOTA
    return parse_bytes(name, value, ", or 'auto', or None or 'none' for no limit")


def key_list(keys: Iterable[bytes] | bytes | str) -> list[bytes]:
    """Returns block hashes as a list; raises InvalidRequest for a value that is none."""
    if isinstance(keys, bytes | str):
        seen = f"a single {type(keys).__name__}"
        raise wrong("keys", keys, "a list of page keys", seen=seen)
    out = list(keys)
    for i, key in enumerate(out):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise wrong(f"keys[{i}]", key, f"{KEY_BYTES} bytes")
    return out


def _folder(value: str | os.PathLike[str]) -> str:
    try:
        path = os.fspath(value)
    except TypeError as error:
        raise wrong("page_folder", value, "a path") from error
    if not isinstance(path, str) or not path or "\0" in path:
        raise wrong("page_folder", value, "a path")
    return path
