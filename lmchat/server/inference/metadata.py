"""What the server and its model are, in the words of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import lmchat
from lmchat.server.inference.prompt_settings import INPUTS

VERSION = "1"
"""The model's only version."""

OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
"""Outputs of the model and their data types. All but `text_output` are sent on request."""

_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


def _documented(example: dict[str, Any]) -> dict[str, Any]:
    """Returns a request's body for the OpenAPI page."""
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


INFER = _documented(
    {
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["My name is"]}
        ],
        "parameters": {"max_tokens": 16, "temperature": 0},
    }
)
GENERATE = _documented(
    {"text_input": "My name is", "parameters": {"max_tokens": 16, "temperature": 0}}
)


def server() -> dict[str, Any]:
    """Returns the server's metadata."""
    return {
        "name": "lmchat",
        "version": lmchat.__version__,
        "extensions": ["binary_tensor_data", "generate", "model_configuration"],
    }


def model(name: str) -> dict[str, Any]:
    """Returns the model's metadata."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": "lmchat",
        "inputs": _tensors(INPUTS),
        "outputs": _tensors(OUTPUTS),
    }


def config(name: str, batch: int) -> dict[str, Any]:
    """Returns the model's configuration, in Triton's form."""
    return {
        "name": name,
        "platform": "lmchat",
        "backend": "lmchat",
        "max_batch_size": 0,
        "input": [
            {**_configured(one, kind), "optional": one != "text_input"}
            for one, kind in INPUTS.items()
        ],
        "output": [_configured(one, kind) for one, kind in OUTPUTS.items()],
        "model_transaction_policy": {"decoupled": True},
        "parameters": {"max_batch_size": {"string_value": str(batch)}},
    }


def _tensors(kinds: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in kinds.items()]


def _configured(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "data_type": _CONFIG_TYPES.get(kind, f"TYPE_{kind}"), "dims": [-1]}
