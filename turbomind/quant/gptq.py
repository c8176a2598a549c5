"""GPTQ checkpoints of 4 and 8 bits.

A word of `qweight` [in * bits / 32, out] holds inputs, one of `qzeros` [groups, out * bits / 32]
outputs. value = (code - zero) * scale. `gptq` stores words of zeros from which 1 is subtracted in
each field, modulo 2^32: a zero of 0 borrows from the next field. `gptq_v2` stores the zeros; newer
tools do so under the former name, so of symmetric checkpoints the stored value decides.
With `desc_act` the columns of a group are anywhere: `g_idx` has the group of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import Rows
from turbomind.models.quantization import Quantization
from turbomind.quant.codes import CodeKind
from turbomind.quant.modules import ModuleScheme, Shapes
from turbomind.quant.packed import (
    SCALES,
    Array,
    check_group_size,
    column_order,
    groups_of,
    scale_kind,
    unpack,
)
from turbomind.quant.tool_fields import agreed_choice, name_of, tool_fields


class Gptq(ModuleScheme):
    """Reads matrices of GPTQ.

    Args:
        quantization: What the checkpoint says.
        checkpoint: The tensors; see `Scheme`.
        is_v2: The zero points are stored themselves. None: the quantization has the format.
    """

    codes_name = "qweight"

    def __init__(
        self,
        quantization: Quantization,
        checkpoint: CheckpointFiles | None,
        is_v2: bool | None = None,
    ) -> None:
        super().__init__(checkpoint)
        fields = tool_fields(quantization)
        bits = name_of(fields, "bits")
        self.bits: int = fields.integer(bits, 1, 16)
        if self.bits not in (4, 8):
            raise fields.error(bits, "4 or 8")
        self.group_size = check_group_size(fields, name_of(fields, "group_size"))
        self.symmetric = fields.flag("sym", True)
        self.is_ordered = fields.flag("desc_act", False) and self.group_size != -1
        names = ("format", "checkpoint_format")
        stored = agreed_choice(fields, names, ("gptq", "gptq_v2")) if is_v2 is None else ""
        self.is_v2 = stored == "gptq_v2" or bool(is_v2)

    def code_kind(self, row: Rows, scales: str) -> CodeKind:
        """Returns the kind of a module's codes with scales of a tensor's type."""
        offsets = "none" if self.symmetric else "zero"
        return scale_kind(scales, self.bits, self.group_size, offsets, self.is_ordered)

    def shapes(self, row: Rows) -> Shapes:
        """Returns the shape and the types of each tensor of a module."""
        outputs, inputs = row.shape
        groups, count = groups_of(inputs, self.group_size), 32 // self.bits
        shapes: Shapes = {
            "qweight": ((inputs // count, outputs), ("I32",)),
            "qzeros": ((groups, outputs // count), ("I32",)),
            "scales": ((groups, outputs), tuple(SCALES)),
        }
        if self.is_ordered or self.has_tensor(row, "g_idx"):
            shapes["g_idx"] = ((inputs,), ("I32",))
        return shapes

    def codes(self, row: Rows) -> _C.CodeSource:
        """Returns a matrix."""
        zeros = None
        if self.symmetric:
            self._check_symmetric(row)
        else:
            add = 0 if self.is_v2 else self._ones
            zeros = self.integers(row, "qzeros", "outputs_last", add=add)
        codes = self.integers(row, "qweight", "inputs_first")
        scales = self.scales(row, groups_first=True)
        (rows, columns), group = row.shape, max(0, self.group_size)
        order = self._order(row)
        return _C.packed_codes(rows, columns, self.bits, group, codes, scales, zeros, order)

    @property
    def _ones(self) -> int:
        """A word whose fields are 1."""
        return 0xFFFFFFFF // ((1 << self.bits) - 1)

    def correction(self, rows: Iterable[Rows]) -> str:
        """Returns "zeros" if a zero point is 0: earlier versions read it and the next one wrong."""
        if self.symmetric or self.is_v2:
            return ""
        modules = {row.tensor: row for row in rows if self.kind(row)}
        for row in modules.values():
            words: Array = self.array(row, "qzeros").view(np.uint32)
            shift = 1
            while shift < self.bits:  # the lowest bit of a field becomes whether all of it are set
                words, shift = words & (words >> shift), 2 * shift
            if (words & self._ones).any():
                return "zeros"
        return ""

    def _check_symmetric(self, row: Rows) -> None:
        """Raises ModelError unless all zero points of a symmetric checkpoint are the middle."""
        words, middle = self.array(row, "qzeros").view(np.uint32), 1 << (self.bits - 1)
        if not any((words == stored * self._ones).all() for stored in (middle - 1, middle)):
            stored = unpack(words, self.bits)
            raise ModelError(
                f"tensor {row.tensor.removesuffix('.weight')}.qzeros has values from "
                f"{stored.min()} to {stored.max()}, expected {middle - 1} or {middle} alone in a "
                "symmetric checkpoint"
            )

    def _order(self, row: Rows) -> Any:
        """Returns the order of the columns; None where the groups are in their order."""
        if self.group_size == -1 or "g_idx" not in self.shapes(row):
            return None
        name, g_idx = f"{row.tensor.removesuffix('.weight')}.g_idx", self.array(row, "g_idx")
        order = column_order(g_idx, self.group_size, name)
        if self.is_ordered:
            return order
        if (order != np.arange(len(order))).any() or (np.diff(g_idx) < 0).any():
            raise ModelError(f"tensor {name} is not in order, expected so without desc_act")
        return None
