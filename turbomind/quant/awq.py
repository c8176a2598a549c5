"""AWQ checkpoints of the version gemm: 4 bits, a scale and a zero point per group.

A word of `qweight` [in, out / 8] and `qzeros` [groups, out / 8] holds eight outputs, in the order
0 2 4 6 1 3 5 7. value = (code - zero) * scale. See AutoAWQ, awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import Rows
from turbomind.models.config import Fields
from turbomind.quant.codes import CodeKind, Codes
from turbomind.quant.modules import ModuleScheme, Shapes
from turbomind.quant.packed import SCALES, check_group_size, groups_of, repeated, scale_kind, unpack

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Fields that change nothing: which matrices have codes follows from the tensors.
_IGNORED = (
    "modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
    "exllama_config", "quant_method",
)  # fmt: skip


class Awq(ModuleScheme):
    """Reads matrices of AWQ. Scales are float16, or bfloat16 also in a float16 model."""

    codes_name = "qweight"

    def __init__(self, config: Mapping[str, Any], checkpoint: CheckpointFiles | None) -> None:
        super().__init__(checkpoint)
        fields = Fields(config, "config.json: quantization_config")
        fields.integer("bits", 4, 4)
        if str(fields.raw("version", "gemm")).lower() != "gemm":
            raise fields.error("version", "'gemm'")
        if not fields.flag("zero_point", True):
            raise fields.error("zero_point", "true")
        self.group_size = check_group_size(fields)
        for name in _IGNORED:
            fields.raw(name)
        fields.refuse_others()

    def code_kind(self, row: Rows, scales: str) -> CodeKind:
        """Returns the kind of a module's codes with scales of a tensor's type."""
        return scale_kind(scales, 4, self.group_size, "zero", False)

    def shapes(self, row: Rows) -> Shapes:
        """Returns the shape and the types of each tensor of a module."""
        outputs, inputs = row.shape
        groups = groups_of(inputs, self.group_size)
        return {
            "qweight": ((inputs, outputs // 8), ("I32",)),
            "qzeros": ((groups, outputs // 8), ("I32",)),
            "scales": ((groups, outputs), tuple(SCALES)),
        }

    def codes(self, row: Rows) -> Codes:
        """Reads rows."""
        parts = self.arrays(row)
        rows = slice(row.begin, row.begin + row.count)
        codes = unpack(parts["qweight"], 4, _ORDER).T[rows]
        zeros, scales = unpack(parts["qzeros"], 4, _ORDER).T[rows], parts["scales"].T[rows]
        columns = row.shape[1]
        return Codes(
            codes,
            repeated(scales, columns, self.group_size),
            repeated(zeros, columns, self.group_size),
        )
