"""Quantization of 16-bit weights while they are loaded: which matrix gets which format."""

from __future__ import annotations

from dataclasses import dataclass

import turbomind._C as _C
from turbomind.params import wrong

METHODS = ("int8", "int4")
NO_QUANTIZATION = "none"
"""A spelling of None for command lines."""
HEADS = {"int8": ("int8", "keep"), "int4": ("int8", "int4", "keep")}
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True)
class Quantize:
    """Formats that replace the dtype of matrices.

    Attributes:
        method: Of the layers' matrices. "int8": symmetric, one scale per output. "int4":
            asymmetric, a scale and a minimum per group of inputs. None: they are stored as codes.
        head: Of the head, and of an embedding that shares its memory: "int8", "int4", or "keep"
            for the dtype. An embedding of its own keeps its dtype: only rows of it are read.
        group_size: Inputs per scale of int4.
    """

    method: str | None
    head: str = "int8"
    group_size: int = DEFAULT_GROUP_SIZE

    def formats(self, config: _C.ModelConfig) -> dict[str, str]:
        """Returns the format of each matrix that does not keep the dtype, by slot."""
        names = {
            "int8": "int8",
            "int4": _C.code_format(4, self.group_size, "bfloat16", "minimum"),
        }
        chosen = {}
        head = "embed" if config.tied_head else "head"
        for slot in _C.weight_slots(config):
            if slot.linear and slot.name.startswith("layers."):
                # A router is small, and its rounding would send tokens to other experts.
                if self.method is not None and not slot.name.endswith(".router"):
                    chosen[slot.name] = names[self.method]
            elif slot.name == head and self.head != "keep":
                chosen[slot.name] = names[self.head]
        return chosen


def read_quantize(quantize: object, head: object, group_size: object) -> Quantize | None:
    """Reads the engine options `quantize`, `head` and `group_size`.

    Returns:
        None without quantization.

    Raises:
        InvalidRequest: A value is unknown, or set without what it belongs to.
    """
    if quantize in (None, NO_QUANTIZATION):
        if group_size is not None:
            raise wrong("group_size", group_size, "None without quantize")
        return None if head is None else Quantize(None, _choice("head", head, HEADS["int8"]))
    method = _choice("quantize", quantize, (*METHODS, NO_QUANTIZATION))
    if head is not None:
        head = _choice("head", head, HEADS[method])
    if group_size is None:
        return Quantize(method, head or "int8")
    if method != "int4":
        expected = f"None with quantize {method!r}, which has one scale per output"
        raise wrong("group_size", group_size, expected)
    if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
        raise wrong("group_size", group_size, "32, 64 or 128")
    return Quantize(method, head or "int8", int(group_size))


def _choice(name: str, value: object, options: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in options:
        raise wrong(name, value, f"one of {', '.join(options)}")
    return value


def format_names(slots: list[_C.Slot]) -> str:
    """Returns the formats of a model's matrices, the one of most bytes first."""
    sizes: dict[str, int] = {}
    for slot in slots:
        if slot.linear:
            sizes[slot.format] = sizes.get(slot.format, 0) + slot.bytes
    return " and ".join(sorted(sizes, key=lambda name: -sizes[name]))
