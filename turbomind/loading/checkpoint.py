"""Checkpoints in safetensors files. Headers are read here, tensors by the core.

A memory map would end the process (SIGBUS) where a file shrinks, or its disk fails, while it is
read, so all reading is pread.

A file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape,
data_offsets}}, then the tensors. The safetensors library has no bfloat16 in
numpy and copies, so the reader is our own. It checks the whole header before it reads a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.models.config import read_json

# Formats a weight can be read from: name in the file -> (name in the core, bytes per element).
DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
# Widths in bits of other formats: a file with one is refused by its name, not as damaged.
OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip

MAX_HEADER = 100_000_000  # bytes; the limit of the format
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAMPLE = 4096  # bytes of one sampled block of a tensor


@dataclass(frozen=True)
class Tensor:
    """Place of a tensor. `begin` and `end` are bytes from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One open file. Raises ModelError naming the file, the tensor and what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.stat = os.fstat(self._descriptor)
        self.size = self.stat.st_size
        if self.size < 8:
            raise ModelError(f"{path}: {self.size} bytes, expected at least 8")
        self.header_bytes, self.tensors = self._read_header()

    def _read(self, begin: int, end: int) -> bytes:
        """Returns the bytes [begin, end) of the file.

        Raises:
            ModelError: The file cannot be read, or has become shorter.
        """
        parts: list[bytes] = []
        while begin < end:
            try:
                part = os.pread(self._descriptor, end - begin, begin)
            except OSError as error:
                raise ModelError(f"cannot read {self.path}: {error.strerror}") from error
            if not part:
                raise ModelError(
                    f"{self.path}: it ends at byte {begin}, expected {self.size} bytes as when it "
                    "was opened: the file changed while it was read"
                )
            parts.append(part)
            begin += len(part)
        return b"".join(parts)

    def _read_header(self) -> tuple[bytes, dict[str, Tensor]]:
        length = int.from_bytes(self._read(0, 8), "little")
        if length > min(self.size - 8, MAX_HEADER):
            raise ModelError(
                f"{self.path}: header of {length} bytes, expected at most "
                f"{min(self.size - 8, MAX_HEADER)}; the file is truncated or not safetensors"
            )
        raw = self._read(8, 8 + length)
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path}: header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise ModelError(
                f"{self.path}: header is a {type(header).__name__}, expected an object"
            )
        header.pop("__metadata__", None)
        tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}
        self._check_layout(tensors)
        return raw, tensors

    def _tensor(self, name: str, entry: Any, start: int) -> Tensor:
        where = f"{self.path}: tensor {name}"
        if not isinstance(entry, dict):
            raise ModelError(f"{where}: header entry is {entry!r}, expected an object")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in OTHER_BITS):
            raise ModelError(f"{where}: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        if not _naturals(shape):
            raise ModelError(f"{where}: shape is {shape!r}, expected a list of sizes")
        if not _naturals(offsets) or len(offsets) != 2:
            raise ModelError(f"{where}: data_offsets is {offsets!r}, expected [begin, end]")
        begin, end = start + offsets[0], start + offsets[1]
        if not start <= begin <= end <= self.size:
            raise ModelError(
                f"{where}: data_offsets is {offsets}, expected inside the file's "
                f"{self.size - start} bytes of data; the file is truncated or damaged"
            )
        bits = DTYPES[dtype][1] * 8 if dtype in DTYPES else OTHER_BITS[dtype]
        expected = math.ceil(math.prod(shape) * bits / 8)
        if end - begin != expected:
            raise ModelError(
                f"{where}: {end - begin} bytes, expected {expected} for {dtype} {shape}"
            )
        return Tensor(name, dtype, tuple(shape), begin, end)

    def _check_layout(self, tensors: dict[str, Tensor]) -> None:
        last = None
        for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
            if last is not None and tensor.begin < last.end:
                raise ModelError(
                    f"{self.path}: tensors {last.name} and {tensor.name} overlap, expected apart"
                )
            last = tensor if tensor.end > tensor.begin else last

    def data(self, tensor: Tensor) -> bytes:
        """Reads the tensor and returns its bytes.

        Raises:
            ModelError: The file cannot be read, or has become shorter.
        """
        return self._read(tensor.begin, tensor.end)

    def source(self, tensor: Tensor) -> _C.SourceFile:
        """Returns the tensor's place, valid while this object exists."""
        length = tensor.end - tensor.begin
        return _C.SourceFile(str(self.path), self._descriptor, tensor.begin, length)

    def prefetch(self, tensor: Tensor) -> None:
        """Asks the system to read the tensor into its page cache."""
        length = tensor.end - tensor.begin
        os.posix_fadvise(self._descriptor, tensor.begin, length, os.POSIX_FADV_WILLNEED)

    def digest(self) -> bytes:
        """Returns the SHA-256 of size, header and sampled content.

        Of each tensor, in order of name, the samples are all bytes up to 12 KiB, else its first,
        middle and last 4 KiB. A change in the rest of a tensor does not change the digest."""
        total = hashlib.sha256(self.size.to_bytes(8, "little") + self.header_bytes)
        for name in sorted(self.tensors):
            begin, end = self.tensors[name].begin, self.tensors[name].end
            if end - begin <= 3 * SAMPLE:
                total.update(self._read(begin, end))
                continue
            middle = begin + (end - begin - SAMPLE) // 2
            for at in (begin, middle, end - SAMPLE):
                total.update(self._read(at, at + SAMPLE))
        return total.digest()


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


class Checkpoint:
    """All tensors of a model folder: `model.safetensors`, or the shards of its index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [SafetensorsFile(path) for path in _weight_files(folder)]
        self._where: dict[str, SafetensorsFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._where:
                    raise ModelError(
                        f"tensor {name} is in {self._where[name].path.name} and in "
                        f"{file.path.name}, expected once"
                    )
                self._where[name] = file
        self._check_index()

    def _check_index(self) -> None:
        if len(self.files) == 1 and self.files[0].path.name == SINGLE:
            return
        for name, file in read_json(self.folder / INDEX)["weight_map"].items():
            found = self._where.get(name)
            if found is None or found.path.name != file:
                raise ModelError(f"{self.folder / INDEX}: tensor {name} is not in {file}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def find(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile, Tensor]:
        """Returns the tensor of that name; raises ModelError for another shape or dtype."""
        file = self._where.get(name)
        if file is None:
            raise ModelError(f"{self.folder}: tensor {name} is missing, expected shape {shape}")
        tensor = file.tensors[name]
        if tensor.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name} has shape {tensor.shape}, expected {shape}"
            )
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"{file.path}: tensor {name} has dtype {tensor.dtype}, "
                f"expected one of {', '.join(DTYPES)}"
            )
        return file, tensor

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of the files' digests, in order of file name."""
        files = sorted(self.files, key=lambda file: file.path.name)
        return hashlib.sha256(b"".join(file.digest() for file in files)).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        hint = (
            f"; {others[0]} is a pickle file, which is never read: convert it to safetensors"
            if others
            else ""
        )
        raise ModelError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX}: weight_map is {weight_map!r}, expected an object")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{folder / INDEX}: shard {name!r}, expected the name of a .safetensors file"
            )
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{folder}: missing {len(missing)} of {len(names)} shards: "
                         f"{', '.join(missing[:8])}")  # fmt: skip
    return [folder / name for name in names]
