"""Where a checkpoint says that its weights are quantized, and by which method.

Not here: the methods (`turbomind.quant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbomind.errors import ModelError
from turbomind.files.json_file import read_json
from turbomind.models.config import Fields

QUANT_METHODS = ("awq", "gptq", "auto-round", "compressed-tensors", "mxfp4")
"""Values of `quant_method` that `turbomind.quant` reads."""

_SYNONYMS = {"intel/auto-round": "auto-round"}
# Fields of config.json, and what names the method of those that have no quant_method.
_FIELDS = {"quantization_config": "", "compression_config": "compression", "quantization": "MLX"}
# Files of tools beside a config.json without these fields, with the method of those without one.
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "",
}
_MODELOPT = "hf_quant_config.json"


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says about its quantized weights.

    Attributes:
        method: One of QUANT_METHODS.
        values: The fields.
        where: The file and, in a config.json, the field that have them; for messages.
    """

    method: str
    values: Mapping[str, Any]
    where: str

    def fields(self) -> Fields:
        """Returns the fields, none of them read."""
        return Fields(self.values, self.where)


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantization that a config.json has, None without one.

    Raises:
        ModelError: The method is not supported.
    """
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for name, method in _FIELDS.items():
            if holder.get(name) not in (None, {}):
                return _read(holder[name], f"config.json: {name}", method)
    return None


def quantization_beside(folder: Path) -> Quantization | None:
    """Returns the quantization that another file of a folder has, None without one.

    Raises:
        ModelError: The file cannot be read, or the method is not supported.
    """
    for name, method in _FILES.items():
        if (folder / name).is_file():
            return _read(read_json(folder / name), name, method)
    if (folder / _MODELOPT).is_file():
        values = read_json(folder / _MODELOPT).get("quantization")
        algorithm = values.get("quant_algo") if isinstance(values, dict) else values
        if algorithm is not None:  # else it is about the KV alone
            raise _unsupported(_MODELOPT, f"{algorithm} of modelopt")
    return None


def _read(values: Any, where: str, method: str) -> Quantization:
    if not isinstance(values, dict):
        raise _unsupported(where, values)
    found = values.get("quant_method") or values.get("method") or method
    found = _SYNONYMS.get(str(found), str(found))
    if found not in QUANT_METHODS:
        is_mlx = not found and {"bits", "group_size"} <= values.keys()
        raise _unsupported(where, "MLX" if is_mlx else found or "unnamed")
    return Quantization(found, values, where)


def _unsupported(where: str, method: Any) -> ModelError:
    return ModelError(
        f"{where} has quantized weights ({method}), expected "
        f"{', '.join(QUANT_METHODS)} or a bfloat16, float16 or float32 checkpoint"
    )
