"""The kinds of codes that matrices are stored as."""

from __future__ import annotations

from dataclasses import dataclass

import turbomind._C as _C


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
