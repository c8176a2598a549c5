"""An open file of tensors, as the loader reads it: its tensors' places, and a digest.

A memory map would end the process (SIGBUS) where a file shrinks, or its disk fails, while it is
read, so all reading is pread.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.shown import shown_name

MAX_NAME = 4096  # characters of the name of a tensor or of an entry
MAX_TENSORS = 100_000  # of a file
SAMPLE = 4096  # bytes of one sampled block of a tensor


@dataclass(frozen=True)
class Tensor:
    """Place of a tensor. `begin` and `end` are bytes from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightFile:
    """One open file. A subclass reads its header into `tensors`.

    Raises ModelError naming the file, the tensor and what is wrong.
    """

    tensors: Mapping[str, Tensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self.stat = os.fstat(self._descriptor)
        self.size = self.stat.st_size

    def header(self) -> bytes:
        """Returns what the digest covers beside the tensors."""
        raise NotImplementedError

    def read(self, begin: int, end: int) -> bytes:
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

    def check_name(self, what: str, name: str) -> None:
        """Raises ModelError for a name that cannot be printed as it is, or is very long."""
        if len(name) > MAX_NAME or not name.isprintable():
            raise ModelError(
                f"{self.path}: {what} {shown_name(name)} has {len(name)} characters, expected at "
                f"most {MAX_NAME}, all of them printable"
            )

    def check_layout(self, tensors: Iterable[Tensor]) -> None:
        """Raises ModelError where two tensors overlap."""
        last = None
        for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
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
        return self.read(tensor.begin, tensor.end)

    def source(self, tensor: Tensor, part: int = 0, parts: int = 1) -> _C.SourceFile:
        """Returns the place of a tensor, or of one of its equal parts, while this object exists."""
        length = (tensor.end - tensor.begin) // parts
        begin = tensor.begin + part * length
        return _C.SourceFile(str(self.path), self._descriptor, begin, length)

    def prefetch(self, tensor: Tensor) -> None:
        """Asks the system to read the tensor into its page cache."""
        length = tensor.end - tensor.begin
        os.posix_fadvise(self._descriptor, tensor.begin, length, os.POSIX_FADV_WILLNEED)

    def digest(self) -> bytes:
        """Returns the SHA-256 of size, header and sampled content.

        Of each tensor, in order of name, the samples are all bytes up to 12 KiB, else its first,
        middle and last 4 KiB. A change in the rest of a tensor does not change the digest."""
        total = hashlib.sha256(self.size.to_bytes(8, "little") + self.header())
        for name in sorted(self.tensors):
            begin, end = self.tensors[name].begin, self.tensors[name].end
            if end - begin <= 3 * SAMPLE:
                total.update(self.read(begin, end))
                continue
            middle = begin + (end - begin - SAMPLE) // 2
            for at in (begin, middle, end - SAMPLE):
                total.update(self.read(at, at + SAMPLE))
        return total.digest()
