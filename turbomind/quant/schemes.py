"""The scheme of a checkpoint, by its quantization_config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models import QUANT_METHODS
from turbomind.quant.awq import Awq
from turbomind.quant.compressed_tensors import CompressedTensors
from turbomind.quant.gptq import Gptq
from turbomind.quant.mxfp4 import Mxfp4
from turbomind.quant.scheme import Scheme

Make = Callable[[Mapping[str, Any], CheckpointFiles | None], Scheme]
_SCHEMES: dict[str, Make] = dict(
    zip(QUANT_METHODS, (Awq, Gptq, CompressedTensors, Mxfp4), strict=True)
)


def scheme_of(config: Mapping[str, Any] | None, checkpoint: CheckpointFiles | None) -> Scheme:
    """Returns the reader of a checkpoint's matrices.

    Args:
        config: The field quantization_config of config.json; None without one.
        checkpoint: The tensors. None: they are not there yet.

    Raises:
        ModelError: A field is not supported.
    """
    if config is None:
        return Scheme(checkpoint)
    return _SCHEMES[config["quant_method"]](config, checkpoint)
