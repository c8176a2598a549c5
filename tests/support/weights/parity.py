"""Comparison of an engine's logits and greedy tokens with those of the reference library.

Import it only after conftest.py has read the options.
"""

from __future__ import annotations

from typing import Any

import devices
import numpy as np
from checkpoints import reference_logits, rounded
from devices import rms

import turbomind

LENGTH = 150  # tokens of a prompt: two full pages and a tail
NEW = 10  # generated tokens
EXPERTS = ("moe", "mixtral", "oss")


def check_logits(
    engine: turbomind.Engine, ids: list[int], model: Any, dtype: str = "bfloat16"
) -> float:
    """Compares logits with those of the reference and returns the tolerance of a logit. `dtype` is
    that of the weights on a GPU."""
    ours, theirs = engine.logits(ids), reference_logits(model, ids)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    largest = np.abs(theirs).max()
    assert np.ptp(theirs, axis=1).min() > 1e-2 * largest, "the reference is flat: nothing is tested"
    if devices.ON_GPU:
        errors = reference_logits(rounded(model, dtype), ids) - theirs
        assert rms(ours - theirs) <= 1.1 * rms(errors)
        # In some models a rounding sends a token to another expert, and all of its logits change.
        assert np.median([rms(row) for row in errors]) < 0.25 * rms(theirs)
        return 3 * float(np.abs(errors).max())
    tolerance = 1e-4 * float(largest)
    assert np.abs(ours - theirs).max() <= tolerance
    return tolerance


def check_greedy(
    engine: turbomind.Engine, model: Any, ids: list[int], count: int, tolerance: float
) -> None:
    """Checks that tokens are the reference's, unless its two best are within the tolerance."""
    result = engine.generate(ids, temperature=0, max_new_tokens=count, ignore_eos=True)
    assert len(result.token_ids) == count
    theirs = reference_logits(model, ids + result.token_ids)[len(ids) - 1 : -1]
    best = theirs.max(axis=1)
    chosen = theirs[np.arange(count), result.token_ids]
    assert (best - chosen <= tolerance).all()


def error_of(name: str, logits: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Returns the root mean square of the differences; of a model with experts that at the median
    position, because where a rounding sends a token to another expert, all logits change."""
    differences = np.concatenate(logits) - np.concatenate(exact)
    if not any(word in name for word in EXPERTS):
        return rms(differences)
    return float(np.median([rms(row) for row in differences]))
