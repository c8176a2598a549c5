"""Codes packed in words of 32 bits, and column orders, as several schemes have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from turbomind.errors import ModelError
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models.config import Fields
from turbomind.quant.codes import CodeKind

GROUPS = (16, 32, 64, 128, 256)  # columns of a scale that the core has
ROW_GROUP = 128  # where a row has one scale, it is repeated
SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_NUMPY = {"I32": "<i4", "I64": "<i8", "I8": "i1", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}

Array = npt.NDArray[Any]


def read_array(
    checkpoint: CheckpointFiles, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> Array:
    """Returns a whole tensor; bfloat16 as uint16.

    Raises:
        ModelError: It is missing, or has another shape or type.
    """
    file, tensor = checkpoint.find(name, shape, dtypes)
    return np.frombuffer(file.data(tensor), _NUMPY[tensor.dtype]).reshape(shape)


def unpack(words: Array, bits: int) -> Array:
    """Returns the fields of words, [..., words, 32 / bits], the low bits of a word first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields: Array = words[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return fields


def group_columns(group_size: int) -> int:
    """Returns the columns of a scale in memory for those of the checkpoint; -1: whole rows."""
    return ROW_GROUP if group_size == -1 else min(group_size, GROUPS[-1])


def groups_of(columns: int, group_size: int) -> int:
    """Returns the number of groups of a row of the checkpoint."""
    return 1 if group_size == -1 else -(-columns // group_size)


def column_order(g_idx: Array, group_size: int, name: str) -> npt.NDArray[np.int32]:
    """Returns the columns sorted by their group.

    Args:
        g_idx: The group of each column; all -1: the columns are in the order of their groups.
        group_size: Columns of a group; the last one may be shorter.
        name: The tensor, for messages.

    Raises:
        ModelError: A group does not exist, or has another number of columns.
    """
    groups = groups_of(len(g_idx), group_size)
    if (g_idx == -1).all():
        return np.arange(len(g_idx), dtype=np.int32)
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise ModelError(
            f"tensor {name} has groups {g_idx.min()} to {g_idx.max()}, expected 0 to {groups - 1}"
        )
    counts = np.bincount(g_idx, minlength=groups)
    sizes = np.minimum(group_size, len(g_idx) - np.arange(groups) * group_size)
    if (counts != sizes).any():
        wrong = int(np.argmax(counts != sizes))
        raise ModelError(
            f"tensor {name} has {counts[wrong]} columns of group {wrong}, expected {sizes[wrong]}"
        )
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def check_group_size(fields: Fields, name: str = "group_size") -> int:
    """Returns the field of the columns of a group: -1, or a power of two from 16 to 1024."""
    size: int = fields.integer(name, -1, 1024)
    if size not in (-1, *GROUPS, 512, 1024):
        raise fields.error(name, "-1 or a power of two from 16 to 1024")
    return size


def scale_kind(dtype: str, bits: int, group_size: int, offsets: str, ordered: bool) -> CodeKind:
    """Returns the kind of codes with scales of a tensor's type."""
    return CodeKind(bits, group_columns(group_size), SCALES[dtype], offsets, ordered)
