"""How far logits of quantized weights are from those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def divergence(theirs: npt.NDArray[Any], ours: npt.NDArray[Any]) -> float:
    """Returns the mean Kullback-Leibler divergence of rows of logits, in nats."""
    p, q = (_log_softmax(each.astype(np.float64)) for each in (theirs, ours))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def round_to_int8(x: Any, group: int) -> Any:
    """Rounds a tensor as products round their input: per group of the last dimension."""
    import torch

    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -columns % group))
    groups = padded.reshape(*x.shape[:-1], -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.round(groups * torch.where(largest > 0, 127 / largest, 0.0))
    return (codes * (largest / 127)).reshape(padded.shape)[..., :columns]


def round_inputs(model: Any, group: int, orders: Mapping[str, Any] | None = None) -> Any:
    """Returns the model, whose products but for the head round their input as ours do.

    Args:
        model: The model of transformers.
        group: Columns that are rounded with one scale.
        orders: The order in which columns form groups, of modules that have one.
    """
    import torch

    def rounded(x: Any, order: Any) -> Any:
        if order is None:
            return round_to_int8(x, group)
        return round_to_int8(x[..., order], group)[..., torch.argsort(order)]

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            order = (orders or {}).get(name)
            module.register_forward_pre_hook(lambda _, x, order=order: (rounded(x[0], order),))
    return model
