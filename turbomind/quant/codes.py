"""Codes of a matrix with their scales, in the arrangement that the core packs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

import turbomind._C as _C

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CodeKind:
    """A kind of codes; equal kinds are packed in one format.

    Attributes:
        bits: Of a code in memory, 4 or 8.
        group: Columns of a scale; 0: one scale per row.
        scales: Type of the scales: "float32", "float16", "bfloat16", or "int8": integer factors
            of a float16 scale per 256 columns.
        offsets: "none": value = scale * (code - 2^(bits-1)). "zero": scale * (code - zero).
            "minimum": scale * code + minimum, or minus the minimum where scales are "int8".
        ordered: Code column j multiplies x[columns[j]].
    """

    bits: int
    group: int
    scales: str
    offsets: str = "none"
    ordered: bool = False

    def format(self) -> str:
        """Returns the name of the core's format."""
        return _C.code_format(self.bits, self.group, self.scales, self.offsets, self.ordered)


@dataclass(frozen=True)
class Codes:
    """Rows of codes: `codes` [rows, columns], or [rows, columns / 2] with an even column in the low
    half of a byte; `scales` and `offsets` [rows, groups]; `super_scales` and `super_offsets`
    [rows, columns / 256], float16; `columns` [columns], a permutation.
    """

    codes: Bytes
    scales: npt.NDArray[Any]
    offsets: npt.NDArray[Any] | None = None
    super_scales: npt.NDArray[np.float16] | None = None
    super_offsets: npt.NDArray[np.float16] | None = None
    columns: npt.NDArray[np.int32] | None = None
    code_bits: int = 8

    def rows(self, columns: int) -> _C.CodeSource:
        """Returns the rows for the core."""
        arrays = {
            f.name: np.ascontiguousarray(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), np.ndarray)
        }
        return _C.code_rows(len(self.codes), columns, code_bits=self.code_bits, **arrays)
