"""MXFP4 checkpoints: 32 values of four bits share an exponent. They are widened to bfloat16, which
holds each of them exactly.

`*_blocks` [experts, out, in / 32, 16] have two codes a byte, the low half first, and `*_scales`
[experts, out, in / 32] exponents with a bias of 127. A code is a sign and e2m1. See the OCP
Microscaling Formats (MX) Specification, version 1.0.
"""

from __future__ import annotations

import numpy as np

from turbomind.errors import ModelError
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.models import Rows
from turbomind.models.quantization import Quantization
from turbomind.quant.scheme import Array, Scheme

BLOCK = 32  # values that share an exponent
_BIAS = 127
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_CODES = np.concatenate([_VALUES, -_VALUES])
_NORMAL = (2, 252)  # exponents with which every value is a normal number of bfloat16


def _bfloat16(values: Array) -> Array:
    """Returns the bits of values that bfloat16 has."""
    bits: Array = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


# The bits of both values of a byte, the low half's in the lower address.
_PAIRS = np.stack(
    [_bfloat16(_CODES[np.arange(256) % 16]), _bfloat16(_CODES[np.arange(256) // 16])], axis=1
).view(np.uint32)[:, 0]


def widened(blocks: Array, scales: Array) -> Array:
    """Returns the bits of the values in bfloat16.

    Args:
        blocks: uint8 [rows, blocks, 16].
        scales: uint8 [rows, blocks]; with 255 the values become NaN or infinite.

    Returns:
        uint16 [rows, 32 * blocks].
    """
    rows, count = scales.shape
    values = _PAIRS[blocks].view(np.uint16).reshape(rows, count, BLOCK)
    shift = (scales.astype(np.int16) - _BIAS).astype(np.uint16) << 7  # of the exponent
    np.add(values, shift[:, :, None], out=values, where=(values & 0x7FFF) != 0)
    odd = (scales < _NORMAL[0]) | (scales > _NORMAL[1])
    if odd.any():
        codes = np.stack([blocks[odd] & 15, blocks[odd] >> 4], axis=2).reshape(-1, BLOCK)
        exponents = scales[odd].astype(np.int32) - _BIAS
        with np.errstate(over="ignore"):
            values[odd] = _bfloat16(np.ldexp(_CODES[codes], exponents[:, None]))
        values[scales == 255] = 0x7FC0
    result: Array = values.reshape(rows, count * BLOCK)
    return result


class Mxfp4(Scheme):
    """Reads stacked experts. A tensor without blocks is dense, whatever the config lists."""

    def __init__(self, quantization: Quantization, checkpoint: CheckpointFiles | None) -> None:
        super().__init__(checkpoint)
        fields = quantization.fields()
        # Which tensors have blocks follows from the checkpoint.
        for name in ("quant_method", "modules_to_not_convert"):
            fields.raw(name)
        fields.flag("dequantize", False)  # of another implementation's weights in memory
        fields.refuse_others()

    def _has_blocks(self, row: Rows) -> bool:
        return f"{row.tensor}_blocks" in self.checkpoint

    def places(self, row: Rows) -> list[tuple[WeightFile, Tensor]]:
        """Returns the tensors that rows are read from."""
        if not self._has_blocks(row):
            return super().places(row)
        count, inputs, outputs = row.shape
        if inputs % BLOCK:
            raise ModelError(
                f"tensor {row.tensor}_blocks has rows of {inputs} values, expected a multiple of 32"
            )
        scales = (count, outputs, inputs // BLOCK)
        return [
            self.checkpoint.find(f"{row.tensor}_blocks", (*scales, BLOCK // 2), ("U8",)),
            self.checkpoint.find(f"{row.tensor}_scales", scales, ("U8",)),
        ]

    def part(self, row: Rows) -> tuple[Array, str]:
        """Reads the matrix that rows are of."""
        if not self._has_blocks(row):
            return super().part(row)
        arrays = []
        for file, tensor in self.places(row):
            length = (tensor.end - tensor.begin) // tensor.shape[0]
            begin = tensor.begin + (row.index or 0) * length
            data = np.frombuffer(file.read(begin, begin + length), np.uint8)
            arrays.append(data.reshape(tensor.shape[1:]))
        return widened(*arrays).T, "bfloat16"
