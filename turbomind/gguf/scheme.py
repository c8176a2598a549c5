"""Quantized GGUF files: the type of each tensor decides. MXFP4 is widened to bfloat16."""

from __future__ import annotations

import math

import numpy as np

import turbomind._C as _C
from turbomind.files.checkpoint import DTYPES
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.gguf.blocks import KINDS, MXFP4, READ, codes_and_exponents
from turbomind.models import Rows
from turbomind.models.description import ZEROS
from turbomind.quant.codes import CodeKind
from turbomind.quant.mxfp4 import widened
from turbomind.quant.scheme import Array, Scheme


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

    def codes(self, row: Rows) -> _C.CodeSource:
        """Returns the matrix of a tensor of blocks."""
        ((file, tensor),) = self.places(row)
        source = file.source(tensor, row.index or 0, math.prod(tensor.shape) // math.prod(row.part))
        rows, columns = row.part
        return _C.block_codes(tensor.name, tensor.dtype, source, rows, columns)

    def widens(self, row: Rows) -> bool:
        """Returns whether the tensor's type is MXFP4."""
        tensor = row.tensor
        matrix = len(row.part) == 2 and tensor in self.checkpoint
        return matrix and self.checkpoint.dtype(tensor) == MXFP4

    def part(self, row: Rows) -> tuple[Array, str]:
        """Reads the matrix that rows are of."""
        if not self.widens(row):
            return super().part(row)
        ((file, tensor),) = self.places(row)
        length = (tensor.end - tensor.begin) // (math.prod(tensor.shape) // math.prod(row.part))
        first = tensor.begin + (row.index or 0) * length
        blocks = np.frombuffer(file.read(first, first + length), np.uint8)
        return widened(*codes_and_exponents(blocks.reshape(row.part[0], -1, 17))), "bfloat16"
