"""Blocks of GGUF tensors as codes with scales. Nothing is quantized again.

The arrangement of each type is that of ggml's ggml-common.h and of the package gguf. A block is 32
columns with float16 scales, or 256 columns (K-quants) with integer factors of float16 scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from turbomind.quant.codes import Bytes, CodeKind, Codes

KINDS = {
    "Q8_0": CodeKind(8, 32, "float16"),
    "Q4_0": CodeKind(4, 32, "float16"),
    "Q4_1": CodeKind(4, 32, "float16", "minimum"),
    "Q5_0": CodeKind(8, 32, "float16"),
    "Q5_1": CodeKind(8, 32, "float16", "minimum"),
    "Q4_K": CodeKind(4, 32, "int8", "minimum"),
    "Q5_K": CodeKind(8, 32, "int8", "minimum"),
    "Q6_K": CodeKind(8, 16, "int8"),
}
MXFP4 = "MXFP4"


def read_blocks(dtype: str, data: bytes, rows: int, block_bytes: int) -> Codes:
    """Returns the codes of a tensor.

    Args:
        dtype: The type of the tensor, one of KINDS.
        data: Its bytes.
        rows: Its rows.
        block_bytes: Bytes of a block.
    """
    blocks = np.frombuffer(data, np.uint8).reshape(rows, -1, block_bytes)
    return _READERS[dtype](blocks)


def read_mxfp4(data: bytes, rows: int) -> tuple[Bytes, Bytes]:
    """Returns the codes and the exponents of a tensor in the arrangement of `quant.mxfp4`."""
    blocks = np.frombuffer(data, np.uint8).reshape(rows, -1, 17)
    codes = _paired(blocks[:, :, 1:], 16)
    return codes.reshape(rows, -1, 16), np.ascontiguousarray(blocks[:, :, 0])


def _halves(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """Returns the float16 at byte `at` of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _flat(values: npt.NDArray[np.generic]) -> Bytes:
    """Returns the codes of all blocks of a row in one axis."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _paired(nibbles: Bytes, run: int) -> Bytes:
    """Returns nibbles in pairs: the low ones of `run` bytes are columns, then the high ones."""
    words = np.ascontiguousarray(nibbles).view("<u2").reshape(len(nibbles), -1, run // 2)
    low = (words & 0x0F) | (words >> 4 & 0xF0)
    high = (words >> 4 & 0x0F) | (words >> 8 & 0xF0)
    return _flat(np.stack([low, high], axis=2).astype(np.uint8))


def _spread(nibbles: Bytes, run: int) -> Bytes:
    """Returns nibbles as bytes, [rows, n, 2, run]: the low ones of `run` bytes, then the high."""
    runs = np.ascontiguousarray(nibbles).reshape(len(nibbles), -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2)


def _q8_0(blocks: Bytes) -> Codes:
    return Codes(_flat(blocks[:, :, 2:] ^ 0x80), _halves(blocks, 0))


def _q4_0(blocks: Bytes) -> Codes:
    return Codes(_paired(blocks[:, :, 2:], 16), _halves(blocks, 0), code_bits=4)


def _q4_1(blocks: Bytes) -> Codes:
    minimum = _halves(blocks, 2)
    return Codes(_paired(blocks[:, :, 4:], 16), _halves(blocks, 0), minimum, code_bits=4)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Returns the bits of the four bytes at `at` of each block as 16 * bit, [rows, blocks * 32]."""
    bits = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")
    return _flat(bits << 4)


def _q5_0(blocks: Bytes) -> Codes:
    codes = _flat(_spread(blocks[:, :, 6:], 16)) | _fifth_bits(blocks, 2)
    return Codes(codes + 112, _halves(blocks, 0))  # stored for a zero of 16, packed for one of 128


def _q5_1(blocks: Bytes) -> Codes:
    codes = _flat(_spread(blocks[:, :, 8:], 16)) | _fifth_bits(blocks, 4)
    return Codes(codes, _halves(blocks, 0), _halves(blocks, 2))


def _factors(packed: Bytes) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Returns scales and minima of 6 bits, [rows, blocks * 8] each, from 12 bytes a block."""
    first, second, last = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=2)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=2)
    return _flat(scales).view(np.int8), _flat(minima).view(np.int8)


def _q4_k(blocks: Bytes) -> Codes:
    scales, minima = _factors(blocks[:, :, 4:16])
    codes = _paired(blocks[:, :, 16:], 32)
    return Codes(codes, scales, minima, _halves(blocks, 0), _halves(blocks, 2), code_bits=4)


def _q5_k(blocks: Bytes) -> Codes:
    scales, minima = _factors(blocks[:, :, 4:16])
    high = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _flat(_spread(blocks[:, :, 48:], 32)) | _flat(high << 4)
    return Codes(codes, scales, minima, _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Bytes) -> Codes:
    rows = len(blocks)
    low = np.ascontiguousarray(blocks[:, :, :128]).reshape(rows, -1, 1, 64)  # of 128 columns each
    nibbles = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(rows, -1, 4, 32)
    high = np.ascontiguousarray(blocks[:, :, 128:192]).reshape(rows, -1, 1, 32)
    pairs = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = _flat(blocks[:, :, 192:208]).view(np.int8)
    codes = _flat(nibbles | pairs << 4) + 96  # stored for a zero of 32, packed for one of 128
    return Codes(codes, scales, super_scales=_halves(blocks, 208))


_READERS: dict[str, Callable[[Bytes], Codes]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
