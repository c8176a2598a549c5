"""Checkpoints of compressed-tensors with integers of 4 and 8 bits.

Of a packed module, `weight_packed` [out, in * bits / 32] holds inputs and `weight_zero_point`
[out * bits / 32, groups] outputs, each plus 2^(bits-1). Else `weight` is int8 [out, in].
value = (code - zero) * scale. See compressed_tensors/compressors and, for the config,
compressed_tensors/quantization/quant_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import turbomind._C as _C
from turbomind.errors import ModelError
from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import Rows
from turbomind.models.config import Fields
from turbomind.models.quantization import Quantization
from turbomind.quant.codes import CodeKind
from turbomind.quant.modules import ModuleScheme, Shapes
from turbomind.quant.packed import (
    SCALES,
    check_group_size,
    column_order,
    groups_of,
    scale_kind,
)
from turbomind.quant.targets import Patterns, Targets
from turbomind.shown import shown

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
# Fields that change nothing: how the codes were found, types that the tensors have.
_IGNORED_OF_VALUES = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True)
class _Group:
    """An entry of `config_groups`: modules, and how their weights are stored."""

    targets: Targets
    bits: int
    group_size: int
    is_symmetric: bool
    is_ordered: bool


class CompressedTensors(ModuleScheme):
    """Reads integer matrices of compressed-tensors.

    Inputs of products are rounded by the core's rule, whatever the config has for them.
    """

    codes_name = "weight_packed"
    scales_name = "weight_scale"

    def __init__(self, quantization: Quantization, checkpoint: CheckpointFiles | None) -> None:
        super().__init__(checkpoint)
        fields = quantization.fields()
        fields.choice("format", (*_FORMATS, "mixed-precision"))
        fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
        _check_empty(fields, "transform_config", {"config_groups": {}})
        sparsity = fields.raw("sparsity_config")
        if not isinstance(sparsity, dict) or sparsity.get("format") != "dense":
            _check_empty(fields, "sparsity_config")
        patterns = Patterns()
        self._ignored = Targets(fields, "ignore", patterns)
        groups = fields.raw("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise fields.error("config_groups", "an object of groups")
        where = f"{fields.where}: config_groups"
        self._groups = [
            _read_group(group, f"{where}: {name}", patterns) for name, group in groups.items()
        ]
        self._group_of: dict[str, _Group | None] = {}
        # Other fields are those that the format's library ignores.
        for name in ("kv_cache_scheme", "moe_sparsity_config"):
            _check_empty(fields, name)

    def has_codes(self, module: str) -> bool:
        """Returns whether a module's matrix is stored as codes."""
        if self._checkpoint is None:
            return self._find_group(module) is not None
        return super().has_codes(module) or self._is_plain(module)

    def code_kind(self, row: Rows, scales: str) -> CodeKind:
        """Returns the kind of a module's codes with scales of a tensor's type."""
        group = self._group(row)
        if group.bits == 8 and group.group_size == -1 and group.is_symmetric:
            return CodeKind(8, 0, "float32")
        offsets = "none" if group.is_symmetric else "zero"
        return scale_kind(scales, group.bits, group.group_size, offsets, group.is_ordered)

    def shapes(self, row: Rows) -> Shapes:
        """Returns the shape and the types of each tensor of a module."""
        group, (outputs, inputs) = self._group(row), row.shape
        groups = groups_of(inputs, group.group_size)
        shapes: Shapes = {"weight_scale": ((outputs, groups), tuple(SCALES))}
        if self._is_plain(_module(row)):
            shapes["weight"] = ((outputs, inputs), ("I8",))
            zeros = ((outputs, groups), ("I8",))
        else:
            shapes["weight_packed"] = ((outputs, _words(inputs, group.bits)), ("I32",))
            shapes["weight_shape"] = ((2,), ("I64", "I32"))
            zeros = ((_words(outputs, group.bits), groups), ("I32",))
        if not group.is_symmetric:
            shapes["weight_zero_point"] = zeros
        if group.is_ordered:
            shapes["weight_g_idx"] = ((inputs,), ("I32",))
        return shapes

    def codes(self, row: Rows) -> _C.CodeSource:
        """Returns a matrix."""
        group, module = self._group(row), _module(row)
        order = zeros = None
        if group.is_ordered:
            name = f"{module}.weight_g_idx"
            order = column_order(self.array(row, "weight_g_idx"), group.group_size, name)
        is_plain = self._is_plain(module)
        if not is_plain:
            shape = tuple(map(int, self.array(row, "weight_shape")))
            if shape != row.shape:
                raise ModelError(f"tensor {module}.weight_shape is {shape}, expected {row.shape}")
        if not group.is_symmetric:
            zeros = self.integers(row, "weight_zero_point", "bytes" if is_plain else "outputs")
        codes = (
            self.integers(row, "weight", "bytes")
            if is_plain
            else self.integers(row, "weight_packed", "inputs")
        )
        scales = self.scales(row, groups_first=False)
        (rows, columns), width = row.shape, max(0, group.group_size)
        return _C.packed_codes(rows, columns, group.bits, width, codes, scales, zeros, order)

    def _is_plain(self, module: str) -> bool:
        """Returns whether a module's codes are a tensor of int8."""
        name = f"{module}.weight"
        return name in self.checkpoint and self.checkpoint.dtype(name) == "I8"

    def _group(self, row: Rows) -> _Group:
        group = self._find_group(_module(row))
        if group is None:
            raise ModelError(
                f"{_module(row)} is stored as codes, expected it among the targets of "
                "quantization_config, and not in ignore"
            )
        return group

    def _find_group(self, module: str) -> _Group | None:
        """Returns the group that names a module most closely, None where it has no codes."""
        if module not in self._group_of:
            kind = "Embedding" if "embed" in module.rpartition(".")[2] else "Linear"
            ranks = [(group.targets.rank(module, kind), group) for group in reversed(self._groups)]
            named = [(rank, group) for rank, group in ranks if rank is not None]
            if self._ignored.rank(module, kind) is not None or not named:
                self._group_of[module] = None
            else:
                self._group_of[module] = min(named, key=lambda pair: pair[0])[1]
        return self._group_of[module]


def _read_group(value: Any, where: str, patterns: Patterns) -> _Group:
    fields = _object(value, where)
    targets = Targets(fields, "targets", patterns)
    fields.choice("format", _FORMATS, _FORMATS[0])
    inputs = fields.raw("input_activations")
    if inputs is not None:
        _check_inputs(_object(inputs, f"{where}: input_activations"))
    weights = _object(fields.raw("weights"), f"{where}: weights")
    fields.refuse_others()

    bits = _check_integers(weights, (4, 8))
    if weights.flag("dynamic", False):
        raise weights.error("dynamic", "false")
    size = weights.raw("group_size")
    default = "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", ("channel", "group"), default)
    if strategy == "group":
        size = check_group_size(weights)
    elif size not in (None, -1):
        raise weights.error("group_size", "-1 or nothing with the strategy 'channel'")
    # "weight" and "static": only the order in which the codes were found.
    orders = (None, False, "weight", "static", *(("group", "dynamic") if size != -1 else ()))
    order = weights.raw("actorder")
    if order not in orders:
        raise weights.error("actorder", " or ".join(map(repr, orders)))
    group = _Group(
        targets,
        bits,
        -1 if size is None else size,
        weights.flag("symmetric", True),
        order in ("group", "dynamic"),
    )
    weights.refuse_others()
    return group


def _check_inputs(fields: Fields) -> None:
    """Accepts int8 with scales from the inputs themselves, which are finer by the core's rule."""
    _check_integers(fields, (8,))
    if fields.raw("dynamic") is not True:
        raise fields.error("dynamic", "true")
    fields.choice("strategy", ("token", "group", "tensor"), "token")
    fields.flag("symmetric", True)
    fields.raw("group_size")
    fields.refuse_others()


def _check_integers(fields: Fields, widths: tuple[int, ...]) -> int:
    """Returns the field `num_bits`."""
    bits: int = fields.integer("num_bits", 1, 32, 8)
    if bits not in widths:
        raise fields.error("num_bits", " or ".join(map(str, widths)))
    fields.choice("type", ("int",), "int")
    for name in _IGNORED_OF_VALUES:
        fields.raw(name)
    return bits


def _object(value: Any, where: str) -> Fields:
    if not isinstance(value, dict):
        raise ModelError(f"{where} is {shown(value)}, expected an object")
    return Fields(value, where)


def _check_empty(fields: Fields, name: str, *others: Any) -> None:
    if fields.raw(name) not in (None, {}, *others):
        raise fields.error(name, "an empty object")


def _module(row: Rows) -> str:
    return row.tensor.removesuffix(".weight")


def _words(count: int, bits: int) -> int:
    """Returns the words of 32 bits that hold codes."""
    return -(-count * bits // 32)
