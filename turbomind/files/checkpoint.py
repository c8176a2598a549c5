"""Checkpoints in safetensors files. Headers are read here, tensors by the core.

A file is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape,
data_offsets}}, then the tensors. The safetensors library has no bfloat16 in
numpy and copies, so the reader is our own. It checks the whole header before it reads a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError
from turbomind.files.json_file import read_json
from turbomind.files.weight_file import MAX_TENSORS, Tensor, WeightFile
from turbomind.shown import shown, shown_name

# Formats a weight can be read from: name in the file -> (name in the core, bytes per element).
DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
# Widths in bits of other formats: a file with one is refused by its name, not as damaged.
OTHER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip

MAX_DIMS = 64  # sizes of a shape
MAX_HEADER = 100_000_000  # bytes; the limit of the format
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFile(WeightFile):
    """One open file. Raises ModelError naming the file, the tensor and what is wrong."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.size < 8:
            raise ModelError(f"{path}: {self.size} bytes, expected at least 8")
        self._header, self.tensors = self._read_header()

    def header(self) -> bytes:
        """Returns the JSON header as it is in the file."""
        return self._header

    def _read_header(self) -> tuple[bytes, dict[str, Tensor]]:
        length = int.from_bytes(self.read(0, 8), "little")
        if length > min(self.size - 8, MAX_HEADER):
            raise ModelError(
                f"{self.path}: header of {length} bytes, expected at most "
                f"{min(self.size - 8, MAX_HEADER)}; the file is truncated or not safetensors"
            )
        raw = self.read(8, 8 + length)
        try:
            header = json.loads(raw, object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{self.path}: header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise ModelError(
                f"{self.path}: header is a {type(header).__name__}, expected an object"
            )
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ModelError(f"{self.path}: {len(header)} tensors, expected at most {MAX_TENSORS}")
        tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}
        self.check_layout(tensors.values())
        return raw, tensors

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Returns an object of the header. The format forbids a name twice."""
        values = dict(pairs)
        if len(values) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ModelError(
                f"{self.path}: the header has {shown_name(twice)} twice, expected it once"
            )
        return values

    def _tensor(self, name: str, entry: Any, start: int) -> Tensor:
        self.check_name("the name of tensor", name)
        where = f"{self.path}: tensor {name}"
        if not isinstance(entry, dict):
            raise ModelError(f"{where}: header entry is {entry!r}, expected an object")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in OTHER_BITS):
            raise ModelError(f"{where}: dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        if not _naturals(shape) or len(shape) > MAX_DIMS:
            raise ModelError(
                f"{where}: shape is {shown(shape)}, expected a list of at most {MAX_DIMS} sizes"
            )
        if not _naturals(offsets) or len(offsets) != 2:
            raise ModelError(f"{where}: data_offsets is {shown(offsets)}, expected [begin, end]")
        begin, end = start + offsets[0], start + offsets[1]
        if not start <= begin <= end <= self.size:
            raise ModelError(
                f"{where}: data_offsets is {shown(offsets)}, expected inside the file's "
                f"{self.size - start} bytes of data; the file is truncated or damaged"
            )
        bits = DTYPES[dtype][1] * 8 if dtype in DTYPES else OTHER_BITS[dtype]
        expected = -(-math.prod(shape) * bits // 8)
        if end - begin != expected:
            raise ModelError(
                f"{where}: {end - begin} bytes, expected {shown(expected)} for {dtype} "
                f"{shown(shape)}"
            )
        return Tensor(name, dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value
    )


class CheckpointFiles:
    """All tensors of a model's files, found by name."""

    def __init__(self, files: Sequence[WeightFile], index: Mapping[str, str] | None = None) -> None:
        self.files = files
        self._index = index or {}
        self._where: dict[str, WeightFile] = {}
        for file in files:
            for name in file.tensors:
                places = (
                    [self._where[name].path.name, file.path.name] if name in self._where else []
                )
                if places and self._index.get(name) == places[0]:
                    continue
                if places and self._index.get(name) != places[1]:
                    raise ModelError(
                        f"tensor {name} is in {self._where[name].path.name} and in "
                        f"{file.path.name}, expected once"
                    )
                self._where[name] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""
        return self._where[name].tensors[name].shape

    def dtype(self, name: str) -> str:
        """Returns the type of a tensor that is there, as in its file."""
        return self._where[name].tensors[name].dtype

    def find(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = DTYPES
    ) -> tuple[WeightFile, Tensor]:
        """Returns the tensor of that name; raises ModelError for another shape or dtype."""
        file = self._where.get(name)
        if file is None:
            hint = f"; the index has it in {self._index[name]}" if name in self._index else ""
            raise ModelError(
                f"{self._place()}: tensor {name} is missing, expected shape {shape}{hint}"
            )
        tensor = file.tensors[name]
        if tensor.shape != shape:
            raise ModelError(
                f"{file.path}: tensor {name} has shape {tensor.shape}, expected {shape}"
            )
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{file.path}: tensor {name} has dtype {tensor.dtype}, "
                f"expected one of {', '.join(dtypes)}"
            )
        return file, tensor

    def _place(self) -> Path:
        return self.files[0].path

    def digest(self) -> str:
        """Returns the SHA-256 (hex) of the files' digests, in order of file name."""
        files = sorted(self.files, key=lambda file: file.path.name)
        return hashlib.sha256(b"".join(file.digest() for file in files)).hexdigest()


class Checkpoint(CheckpointFiles):
    """All tensors of a model folder: `model.safetensors`, or the shards of its index.

    The index decides between two copies of a tensor. Tensors that it names and no shard has are
    missing where they are needed: tools that drop some leave their names there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _read_index(folder)
        files = [folder / name for name in sorted(set(index.values()))] or [folder / SINGLE]
        super().__init__([SafetensorsFile(path) for path in files], index)

    def _place(self) -> Path:
        return self.folder


def _read_index(folder: Path) -> dict[str, str]:
    """Returns the shard of each tensor; empty for a checkpoint in one file."""
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        others = sorted(p.name for p in folder.glob("*.safetensors"))
        hint = ""
        if pickles:
            hint = (
                f"; {pickles[0]} is a pickle file, which is never read: convert it to safetensors"
            )
        if others:
            hint = (
                f"; {others[0]} has another layout, which is not read: convert it as transformers"
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
    return {name: str(file) for name, file in weight_map.items()}
