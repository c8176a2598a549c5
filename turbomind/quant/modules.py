"""Schemes that store a module's matrix as several tensors in place of its `weight`."""

from __future__ import annotations

from collections.abc import Iterable

import turbomind._C as _C
from turbomind.files.weight_file import Tensor, WeightFile
from turbomind.models import Rows
from turbomind.quant.codes import CodeKind
from turbomind.quant.packed import SCALES, Array, read_array
from turbomind.quant.scheme import Scheme

Shapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


class ModuleScheme(Scheme):
    """The base. A matrix whose codes are not there is dense, whatever the config lists."""

    scales_name = "scales"
    """End of the name of a module's scales."""

    def has_codes(self, module: str) -> bool:
        """Returns whether a module's matrix is stored as codes."""
        if self._checkpoint is None:
            return ".layers." in module  # as in nearly all checkpoints
        return f"{module}.{self.codes_name}" in self.checkpoint

    def has_tensor(self, row: Rows, end: str) -> bool:
        """Returns whether a module has a tensor that some tools leave out."""
        return self._checkpoint is not None and f"{_module(row)}.{end}" in self.checkpoint

    def code_kind(self, row: Rows, scales: str) -> CodeKind:
        """Returns the kind of a module's codes with scales of a tensor's type."""
        raise NotImplementedError

    def shapes(self, row: Rows) -> Shapes:
        """Returns the shape and the types of each tensor of a module, by the end of its name."""
        raise NotImplementedError

    def kind(self, row: Rows) -> CodeKind | None:
        """Returns the kind of a module's codes; None where it has a dense weight."""
        module = _module(row)
        if module is None or not self.has_codes(module):
            return None
        if self._checkpoint is None:
            return self.code_kind(row, "F16")
        name = f"{module}.{self.scales_name}"
        _, tensor = self.checkpoint.find(name, *self.shapes(row)[self.scales_name])
        return self.code_kind(row, tensor.dtype)

    def places(self, row: Rows) -> list[tuple[WeightFile, Tensor]]:
        """Returns the tensors that rows are read from."""
        if self.kind(row) is None:
            return super().places(row)
        module = _module(row)
        return [
            self.checkpoint.find(f"{module}.{end}", *expected)
            for end, expected in self.shapes(row).items()
        ]

    def array(self, row: Rows, end: str) -> Array:
        """Reads a tensor of a module."""
        return read_array(self.checkpoint, f"{_module(row)}.{end}", *self.shapes(row)[end])

    def integers(
        self, row: Rows, end: str, packing: str, interleaved: bool = False, add: int = 0
    ) -> _C.PackedIntegers:
        """Returns a tensor of a module as integers in words; see `_C.PackedIntegers`."""
        file, tensor = self.checkpoint.find(f"{_module(row)}.{end}", *self.shapes(row)[end])
        return _C.PackedIntegers(tensor.name, file.source(tensor), packing, interleaved, add)

    def scales(self, row: Rows, groups_first: bool) -> _C.PackedScales:
        """Returns the scales of a module."""
        name = f"{_module(row)}.{self.scales_name}"
        file, tensor = self.checkpoint.find(name, *self.shapes(row)[self.scales_name])
        return _C.PackedScales(tensor.name, file.source(tensor), SCALES[tensor.dtype], groups_first)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Leaves out biases of zero, which older tools store for all matrices."""
        return [name for name in names if not self._is_zero_bias(name)]

    def _is_zero_bias(self, name: str) -> bool:
        module, _, end = name.rpartition(".")
        if end != "bias" or not self.has_codes(module):
            return False
        file, tensor = self.checkpoint.find(name, self.checkpoint.shape(name))
        return not any(file.data(tensor))


def _module(row: Rows) -> str | None:
    """Returns the module of a matrix."""
    module, _, end = row.tensor.rpartition(".")
    return module if end == "weight" and len(row.shape) == 2 else None
