"""Types of blocks in GGUF files: what each stands for, and the arrangement of MXFP4's."""

from __future__ import annotations

import numpy as np

import turbomind._C as _C
from turbomind.files.checkpoint import DTYPES
from turbomind.quant.codes import CodeKind
from turbomind.quant.scheme import Array

KINDS = {name: CodeKind(*facts) for name, facts in _C.block_formats()}
MXFP4 = "MXFP4"
READ = (*DTYPES, MXFP4, *KINDS)
"""Types of matrices that are read."""


def codes_and_exponents(blocks: Array) -> tuple[Array, Array]:
    """Returns blocks of MXFP4, [rows, blocks, 17], in the arrangement of `quant.mxfp4`."""
    words = np.ascontiguousarray(blocks[:, :, 1:]).view("<u2")  # low halves come first
    low = (words & 0x0F) | (words >> 4 & 0xF0)
    high = (words >> 4 & 0x0F) | (words >> 8 & 0xF0)
    return np.concatenate([low, high], axis=2).astype(np.uint8), blocks[:, :, 0].copy()
