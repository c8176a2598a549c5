"""The scheme of a checkpoint, by what it says about its quantized weights."""

from __future__ import annotations

from collections.abc import Callable

from turbomind.files.checkpoint import CheckpointFiles
from turbomind.models.quantization import Quantization
from turbomind.quant.awq import Awq
from turbomind.quant.compressed_tensors import CompressedTensors
from turbomind.quant.gptq import Gptq
from turbomind.quant.mxfp4 import Mxfp4
from turbomind.quant.scheme import Scheme

Make = Callable[[Quantization, CheckpointFiles | None], Scheme]

# The last word of AutoRound's packing, after which older versions write the kernel of an engine:
# AWQ's, GPTQ's, or GPTQ's with the zero points themselves.
_PACKINGS = {
    "auto_round": "gptq_v2", "gptqmodel": "gptq_v2", "auto": "gptq", "gptq": "gptq",
    "auto_gptq": "gptq", "awq": "awq", "auto_awq": "awq",
}  # fmt: skip
_KERNELS = ("exllamav2", "tritonv2", "triton", "marlin")


def _auto_round(quantization: Quantization, checkpoint: CheckpointFiles | None) -> Scheme:
    """Returns the reader of matrices that AutoRound has packed."""
    fields = quantization.fields()
    name = "packing_format" if fields.raw("packing_format") is not None else "backend"
    words = str(fields.raw(name, "auto_gptq")).lower().split(":")
    packing = next((word for word in reversed(words) if word not in _KERNELS), "")
    if packing not in _PACKINGS:
        names = ("auto_round", *(f"auto_round:{each}" for each in ("auto_gptq", "auto_awq")))
        raise fields.error(name, " or ".join(map(repr, names)))
    if _PACKINGS[packing] == "awq":
        return Awq(quantization, checkpoint)
    return Gptq(quantization, checkpoint, is_v2=_PACKINGS[packing] == "gptq_v2")


_SCHEMES: dict[str, Make] = {
    "awq": Awq,
    "gptq": Gptq,
    "auto-round": _auto_round,
    "compressed-tensors": CompressedTensors,
    "mxfp4": Mxfp4,
}


def scheme_of(quantization: Quantization | None, checkpoint: CheckpointFiles | None) -> Scheme:
    """Returns the reader of a checkpoint's matrices.

    Args:
        quantization: What the checkpoint says; None without quantized weights.
        checkpoint: The tensors. None: they are not there yet.

    Raises:
        ModelError: A field is not supported.
    """
    if quantization is None:
        return Scheme(checkpoint)
    return _SCHEMES[quantization.method](quantization, checkpoint)
