"""AWQ checkpoints of the version gemm: 4 bits, a scale and a zero point per group.

A word of `qweight` [in, out / 8] and `qzeros` [groups, out / 8] holds eight outputs, in the order
0 2 4 6 1 3 5 7. value = (code - zero) * scale. See AutoAWQ, awq/utils/packing_utils.py.
"""

from __future__ import annotations

import turbomind._C as _C
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import Rows
from turbomind.models.quantization import Quantization
from turbomind.quant.codes import CodeKind
from turbomind.quant.modules import ModuleScheme, Shapes
from turbomind.quant.packed import SCALES, check_group_size, groups_of, scale_kind
from turbomind.quant.tool_fields import agreed_choice, name_of, tool_fields


class Awq(ModuleScheme):
    """Reads matrices of AWQ. Scales are float16, or bfloat16 also in a float16 model.

    Which matrices have codes follows from the tensors, and so do the zero points: tools store them
    also in symmetric checkpoints.
    """

    codes_name = "qweight"

    def __init__(self, quantization: Quantization, checkpoint: CheckpointFiles | None) -> None:
        super().__init__(checkpoint)
        fields = tool_fields(quantization)
        fields.integer(name_of(fields, "bits"), 4, 4)
        agreed_choice(fields, ("version", "format", "checkpoint_format"), ("gemm",))
        if fields.raw("backend") == "llm-awq":  # which has an order of its own
            raise fields.error("backend", "'autoawq'")
        self.is_asymmetric = fields.flag("zero_point", True)
        self.group_size = check_group_size(fields, name_of(fields, "group_size"))

    def code_kind(self, row: Rows, scales: str) -> CodeKind:
        """Returns the kind of a module's codes with scales of a tensor's type."""
        offsets = "zero" if "qzeros" in self.shapes(row) else "none"
        return scale_kind(scales, 4, self.group_size, offsets, False)

    def shapes(self, row: Rows) -> Shapes:
        """Returns the shape and the types of each tensor of a module."""
        outputs, inputs = row.shape
        groups = groups_of(inputs, self.group_size)
        shapes: Shapes = {
            "qweight": ((inputs, outputs // 8), ("I32",)),
            "scales": ((groups, outputs), tuple(SCALES)),
        }
        if self.is_asymmetric or self.has_tensor(row, "qzeros"):
            shapes["qzeros"] = ((groups, outputs // 8), ("I32",))
        return shapes

    def codes(self, row: Rows) -> _C.CodeSource:
        """Returns a matrix."""
        zeros = None
        if "qzeros" in self.shapes(row):
            zeros = self.integers(row, "qzeros", "outputs_last", interleaved=True)
        codes = self.integers(row, "qweight", "outputs_last", interleaved=True)
        scales = self.scales(row, groups_first=True)
        rows, columns = row.shape
        group = max(0, self.group_size)
        return _C.packed_codes(rows, columns, 4, group, codes, scales, zeros)
