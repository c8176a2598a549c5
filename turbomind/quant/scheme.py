"""How a checkpoint stores its matrices: all of them dense, or some as codes with scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.files.checkpoint import DTYPES, CheckpointFiles
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.models import Rows
from turbomind.models.description import ZEROS
from turbomind.quant.codes import CodeKind

Array = npt.NDArray[Any]


class Scheme:
    """The scheme of a checkpoint without codes, and the base of the others.

    Args:
        checkpoint: The tensors. None: they are not there yet, so every matrix of a layer is assumed
            to have the scheme's codes.
    """

    codes_name = ""
    """End of the name of the tensor of codes that replaces a module's `weight`."""

    def __init__(self, checkpoint: CheckpointFiles | None) -> None:
        self._checkpoint = checkpoint

    @property
    def checkpoint(self) -> CheckpointFiles:
        """The tensors."""
        assert self._checkpoint is not None
        return self._checkpoint

    def kind(self, row: Rows) -> CodeKind | None:
        """Returns the kind of the codes that rows are stored as; None for dense rows."""
        return None

    def widens(self, row: Rows) -> bool:
        """Returns whether `part` makes values of a tensor that the core cannot read."""
        return False

    def places(self, row: Rows) -> list[tuple[WeightFile, Tensor]]:
        """Returns the tensors that rows are read from.

        Raises:
            ModelError: One is missing, or has another shape or type than expected.
        """
        return [] if row.tensor == ZEROS else [self.checkpoint.find(row.tensor, row.shape)]

    def codes(self, row: Rows) -> _C.CodeSource:
        """Returns the matrix that rows are of, which have a kind; the core reads it in pieces.

        Raises:
            ModelError: A tensor has a value that is out of range.
        """
        raise NotImplementedError

    def correction(self, rows: Iterable[Rows]) -> str:
        """Names what earlier versions read wrong in the codes of rows; empty for nothing.

        It is a part of the fingerprint, so the KV that they stored is not used.
        """
        return ""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Returns those of the tensors' names that are not without an effect."""
        return list(names)

    def formats(self, slots: Sequence[tuple[str, list[Rows]]], dtype: str) -> dict[str, str]:
        """Returns the format of each slot of the core that has codes.

        Args:
            slots: The slots with their rows.
            dtype: The format of dense rows.

        Raises:
            ModelError: The parts of a slot differ where the core has one product for all of them.
        """
        found = {}
        for slot, rows in slots:
            kinds = [self.kind(row) for row in rows]
            if any(kinds):
                found[slot] = _slot_format(slot, rows, kinds, dtype)
        return found

    def pack(self, builder: _C.DecoderBuilder, slot: str, rows: Sequence[Rows]) -> None:
        """Fills a slot of the core."""
        segments: list[Any] = []
        parts: dict[tuple[str, int | None], tuple[Array, str]] = {}  # gate and up may be of one
        for row in rows:
            if row.tensor == ZEROS:
                zeros = np.zeros((row.count, row.columns), "<u4")
                segments.append((zeros, "float32", 0, row.count, row.columns))
                continue
            if self.kind(row) is not None:
                segments.append((self.codes(row), row.begin, row.count))
                continue
            if self.widens(row) or not row.contiguous:
                place = (row.tensor, row.index)
                if place not in parts:
                    parts[place] = self.part(row)
                values, dtype = parts[place]
                segments.append((_copied(values, row), dtype, 0, row.count, row.columns))
                continue
            file, tensor = self.checkpoint.find(row.tensor, row.shape)
            dtype = DTYPES[tensor.dtype][0]
            first = row.begin + (row.index or 0) * row.part[0]
            segments.append((file.source(tensor), dtype, first, row.count, row.columns))
        builder.set(slot, segments)

    def part(self, row: Rows) -> tuple[Array, str]:
        """Reads the matrix that rows are of as the file has it, and returns the core's type of it.

        Raises:
            ModelError: The tensor is missing, or has another shape or type.
        """
        file, tensor = self.checkpoint.find(row.tensor, row.shape)
        dtype, size = DTYPES[tensor.dtype]
        length = math.prod(row.part) * size
        begin = tensor.begin + (row.index or 0) * length
        data = np.frombuffer(file.read(begin, begin + length), f"<u{size}")
        return data.reshape(row.part), dtype


def _copied(part: Array, row: Rows) -> Array:
    """Returns rows side by side."""
    matrix = part.reshape(len(part), -1).T if row.transposed else part
    return np.ascontiguousarray(matrix[row.begin :: row.step][: row.count])


def _slot_format(
    slot: str, rows: Sequence[Rows], kinds: Sequence[CodeKind | None], dtype: str
) -> str:
    parts: list[tuple[int, str]] = []
    for row, kind in zip(rows, kinds, strict=True):
        name = dtype if kind is None else kind.format()
        # Parts with a column order have one each.
        if parts and parts[-1][1] == name and not (kind and kind.ordered and slot.endswith("qkv")):
            parts[-1] = (parts[-1][0] + row.count, name)
        else:
            parts.append((row.count, name))
    if len(parts) == 1:
        return parts[0][1]
    if not slot.endswith("qkv"):
        stored = ", ".join(f"{r.tensor} as {n}" for r, (_, n) in zip(rows, parts, strict=False))
        raise ModelError(f"weight {slot}: {stored}, expected one format for both")
    return _C.parts_format(parts)
