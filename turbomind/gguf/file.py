"""GGUF files: metadata and the places of tensors, with every count and offset checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is a magic, a version, the
counts of tensors and metadata entries, the entries, the tensors' names, shapes, types and offsets,
then their data. Lengths and counts of the file are compared with its size before they are used.

Not here: what the metadata mean for a model (`turbomind.loading`) and for a tokenizer
(`lmchat.text`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbomind.errors import ModelError
from turbomind.files.checkpoint import DTYPES
from turbomind.files.weight_file import MAX_TENSORS, Tensor, WeightFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 has counts of 32 bits
MAX_DIMS = 4
MAX_STRING = 64 << 20  # bytes; a chat template, or a tokenizer.json, is the longest
MAX_ITEMS = 4 << 20  # of an array; the largest vocabularies have 256 Ki tokens
READ = 1 << 20  # bytes of one read of the header

# Types of tensors: number in the file -> (name, elements of a block, bytes of a block).
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

# Types of metadata with values of a fixed size: number in the file -> (name, format of struct).
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("uint8", "<B"), 1: ("int8", "<b"), 2: ("uint16", "<H"), 3: ("int16", "<h"),
    4: ("uint32", "<I"), 5: ("int32", "<i"), 6: ("float32", "<f"), 7: ("bool", "<?"),
    10: ("uint64", "<Q"), 11: ("int64", "<q"), 12: ("float64", "<d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Array:
    """Place of an array of the metadata: a type's number, a count, and bytes of the file."""

    kind: int
    count: int
    begin: int
    end: int


class _Header:
    """Reads the header from its start. No read goes beyond the file's end."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.at = 0  # in the file
        self._begin, self._buffer = 0, b""

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {problem}")

    def take(self, count: int, what: str) -> bytes:
        """Returns the next `count` bytes."""
        self.skip(count, what)
        first = self.at - count
        if first < self._begin or self.at > self._begin + len(self._buffer):
            end = min(self.file.size, max(self.at, first + READ))
            self._begin, self._buffer = first, self.file.read(first, end)
        return self._buffer[first - self._begin : self.at - self._begin]

    def skip(self, count: int, what: str) -> None:
        left = self.file.size - self.at
        if count > left:
            raise self.error(
                f"{what} takes {count} bytes at byte {self.at}, expected at most the {left} that "
                "are left; the file is truncated or damaged"
            )
        self.at += count

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, least: int) -> int:
        """Returns a count of things that take at least `least` bytes each."""
        value: int = self.number("<Q", f"the number of {what}")
        left = self.file.size - self.at
        if value > left // least:
            raise self.error(
                f"{value} {what} at byte {self.at}, expected at most {left // least} in the {left} "
                "bytes that are left; the file is truncated or damaged"
            )
        return value

    def length(self, what: str) -> int:
        """Returns the length of a string."""
        value: int = self.number("<Q", f"the length of {what}")
        if value > MAX_STRING:
            raise self.error(f"{what} has {value} bytes, expected at most {MAX_STRING}")
        return value

    def text(self, what: str) -> str:
        data = self.take(self.length(what), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is {data[:40]!r}, expected UTF-8") from error


class GgufFile(WeightFile):
    """One open file.

    Attributes:
        metadata: The entries: numbers, bools and strings as they are, arrays as their places.
        tensors: The tensors by name. Shapes are in the order of numpy: rows, columns.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header = _Header(self)
        if self.size < 24 or header.take(4, "the magic") != MAGIC:
            start = self.read(0, min(4, self.size))
            raise ModelError(
                f"{path}: not a GGUF file: {self.size} bytes, beginning with {start!r}, expected "
                f"{MAGIC!r}"
            )
        version = header.number("<I", "the version")
        if version not in VERSIONS:
            big = " of little endian" if version % 65536 == 0 else ""
            raise header.error(f"GGUF version is {version}, expected 2 or 3{big}")
        tensors = header.count("tensors", 24)
        entries = header.count("metadata entries", 13)
        for what, count in (("tensors", tensors), ("metadata entries", entries)):
            if count > MAX_TENSORS:
                raise header.error(f"{count} {what}, expected at most {MAX_TENSORS}")
        self.metadata: dict[str, Any] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        for _ in range(entries):
            self._read_entry(header)
        self._data = 0
        self.tensors = self._read_tensors(header, tensors)

    def header(self) -> bytes:
        """Returns the file's bytes in front of the tensors."""
        return self.read(0, self._data)

    def raw(self, key: str) -> bytes:
        """Returns the bytes of an entry's value, with its type."""
        return self.read(*self._spans[key])

    def array(self, key: str) -> list[Any]:
        """Returns the values of an array of the metadata.

        Raises:
            ModelError: There is no such entry, or it is not an array.
        """
        array = self.metadata.get(key)
        if not isinstance(array, Array):
            seen = "absent" if array is None else repr(array)
            raise ModelError(f"{self.path}: {key} is {seen}, expected an array")
        data = self.read(array.begin, array.end)
        if array.kind != _STRING:
            return list(np.frombuffer(data, _SCALARS[array.kind][1].replace("?", "b1")).tolist())
        return list(self._strings(key, data))

    def _strings(self, key: str, data: bytes) -> Iterator[str]:
        at = 0
        while at < len(data):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            try:
                yield data[at + 8 : end].decode()
            except UnicodeDecodeError as error:
                raise ModelError(
                    f"{self.path}: {key} has {data[at + 8 : end][:40]!r}, expected UTF-8"
                ) from error
            at = end

    def _read_entry(self, header: _Header) -> None:
        key = header.text("a metadata key")
        self.check_name("the metadata key", key)
        if key in self.metadata:
            raise header.error(f"metadata {key} is there twice, expected once")
        begin = header.at
        kind = header.number("<I", f"the type of {key}")
        if kind == _ARRAY:
            value: Any = self._read_array(header, key)
        elif kind == _STRING:
            value = header.text(key)
        elif kind in _SCALARS:
            value = header.number(_SCALARS[kind][1], key)
        else:
            raise header.error(f"{key} has type {kind}, expected a type of GGUF, 0 to 12")
        self.metadata[key] = value
        self._spans[key] = (begin, header.at)

    def _read_array(self, header: _Header, key: str) -> Array:
        kind = header.number("<I", f"the type of {key}")
        if kind != _STRING and kind not in _SCALARS:
            raise header.error(f"{key} is an array of type {kind}, expected numbers or strings")
        size = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind][1])
        count = header.count(f"values of {key}", size)
        if count > MAX_ITEMS:
            raise header.error(f"{key} has {count} values, expected at most {MAX_ITEMS}")
        begin = header.at
        if kind == _STRING:
            for _ in range(count):
                header.skip(header.length(f"a string of {key}"), key)
        else:
            header.skip(count * size, key)
        return Array(kind, count, begin, header.at)

    def _read_tensors(self, header: _Header, count: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for _ in range(count):
            tensor = self._read_tensor(header)
            if tensor.name in tensors:
                raise header.error(f"tensor {tensor.name} is there twice, expected once")
            tensors[tensor.name] = tensor
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise header.error(f"general.alignment is {align!r}, expected a power of two")
        self._data = min(-(-header.at // align) * align, self.size)
        for tensor in tensors.values():
            tensors[tensor.name] = self._placed(tensor, align)
        self.check_layout(tensors.values())
        return tensors

    def _read_tensor(self, header: _Header) -> Tensor:
        """Returns a tensor whose place is relative to the start of the data."""
        name = header.text("the name of a tensor")
        self.check_name("the name of tensor", name)
        what = f"tensor {name}"
        dims = header.number("<I", what)
        if not 1 <= dims <= MAX_DIMS:
            raise header.error(f"{what} has {dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(header.number("<Q", what) for _ in range(dims))[::-1]
        kind = header.number("<I", what)
        begin = header.number("<Q", what)
        if kind not in TYPES:
            raise header.error(f"{what} has type {kind}, expected {', '.join(DTYPES)} or quantized")
        dtype, elements, size = TYPES[kind]
        if shape[-1] % elements:
            raise header.error(
                f"{what} has rows of {shape[-1]}, expected a multiple of {elements} for {dtype}"
            )
        return Tensor(name, dtype, shape, begin, begin + math.prod(shape) // elements * size)

    def _placed(self, tensor: Tensor, align: int) -> Tensor:
        begin, end = self._data + tensor.begin, self._data + tensor.end
        if tensor.begin % align or end > self.size:
            raise ModelError(
                f"{self.path}: tensor {tensor.name} is at bytes {begin} to {end}, expected a "
                f"multiple of {align} from {self._data} on, inside the file's {self.size} bytes; "
                "the file is truncated or damaged"
            )
        return Tensor(tensor.name, tensor.dtype, tensor.shape, begin, end)


def is_gguf(path: Path) -> bool:
    """Returns whether the path is a file with the magic or the suffix of GGUF."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == MAGIC
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
