"""Quantized GGUF files: the type of each tensor decides. MXFP4 is widened to bfloat16."""

from __future__ import annotations

import math

from turbomind.files.checkpoint import DTYPES
from turbomind.files.gguf import BLOCK_BYTES
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.models import Rows
from turbomind.models.description import ZEROS
from turbomind.quant.codes import CodeKind, Codes
from turbomind.quant.gguf_blocks import KINDS, MXFP4, read_blocks, read_mxfp4
from turbomind.quant.mxfp4 import widened
from turbomind.quant.scheme import Array, Scheme

READ = (*DTYPES, MXFP4, *KINDS)
"""Types of matrices that are read."""


class GgufScheme(Scheme):
    """Tensors of blocks. Llama's q and k rows stay in the file's order."""

    def kind(self, row: Rows) -> CodeKind | None:
        """Returns the kind that the tensor's type stands for."""
        if len(row.part) != 2 or row.tensor not in self.checkpoint:
            return None
        return KINDS.get(self.checkpoint.dtype(row.tensor))

    def places(self, row: Rows) -> list[tuple[WeightFile, Tensor]]:
        """Returns the tensor that rows are read from."""
        if row.tensor == ZEROS:
            return []
        types = READ if len(row.part) == 2 else DTYPES
        return [self.checkpoint.find(row.tensor, row.shape, types)]

    def codes(self, row: Rows) -> Codes:
        """Reads the rows of a tensor of blocks."""
        dtype, data = self._data(row, row.begin, row.count)
        return read_blocks(dtype, data, row.count, BLOCK_BYTES[dtype])

    def widens(self, row: Rows) -> bool:
        """Returns whether the tensor's type is MXFP4."""
        tensor = row.tensor
        matrix = len(row.part) == 2 and tensor in self.checkpoint
        return matrix and self.checkpoint.dtype(tensor) == MXFP4

    def part(self, row: Rows) -> tuple[Array, str]:
        """Reads the matrix that rows are of."""
        if not self.widens(row):
            return super().part(row)
        _, data = self._data(row, 0, row.part[0])
        return widened(*read_mxfp4(data, row.part[0])), "bfloat16"

    def _data(self, row: Rows, begin: int, count: int) -> tuple[str, bytes]:
        """Returns the type of a tensor of blocks, and the bytes of rows of a matrix."""
        ((file, tensor),) = self.places(row)
        row_bytes = (tensor.end - tensor.begin) // math.prod(tensor.shape[:-1])
        first = tensor.begin + (begin + (row.index or 0) * row.part[0]) * row_bytes
        return tensor.dtype, file.read(first, first + count * row_bytes)
