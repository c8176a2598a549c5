"""Predicts the tokens of the scripted model (`cpp/tests/engine/scripted_model.h`).

The KV of that model is a chain of hashes over all tokens, and its logits are a hash of the chain.
This module computes the same on plain lists, so that a wrong, stale or missing KV page shows as
another token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turbomind import _C
from turbomind.params import sampling_params
from turbomind.settings import SAMPLING

_MASK = (1 << 64) - 1
_C0, _C1 = 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019
_C2, _C3 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST_CHAIN, _FIRST_FOLD, _FIRST_HASH = 6, 3, 11
_LIMITS = ("max_new_tokens", "min_new_tokens")


def mix(a: int, b: int) -> int:
    """Returns the model's hash of two words."""
    x = (a * _C0 + b + _C1) & _MASK
    x = (x ^ (x >> 30)) * _C2 & _MASK
    x = (x ^ (x >> 27)) * _C3 & _MASK
    return x ^ (x >> 31)


class ScriptedRule:
    """The model of `_C.test_scripted_model(vocab, ...)`: one cache group, full attention.

    The states of the last transcript are cached, so that a transcript with the same prefix costs
    only its suffix.
    """

    def __init__(self, vocab: int, eos_token_ids: Sequence[int]) -> None:
        self._eos = list(eos_token_ids)
        self._right: set[int] = set()  # hashes of replies that were checked
        self._ids: list[int] = []
        self._states = [(_FIRST_CHAIN, _FIRST_FOLD)]  # (chain, fold) after each token
        with np.errstate(over="ignore"):
            self._words = np.arange(vocab, dtype=np.uint64) + np.uint64(_C1)

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns the logits, [vocab], after the last of at least one token."""
        self._follow(ids)
        fold = mix(_FIRST_HASH, self._states[len(ids)][1])
        with np.errstate(over="ignore"):
            x = self._words + np.uint64(fold * _C0 & _MASK)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(_C2)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(_C3)
            bits = (x ^ (x >> np.uint64(31))) >> np.uint64(40)
        return bits.astype(np.float32) / np.float32(1 << 20) - np.float32(8)

    def _follow(self, ids: Sequence[int]) -> None:
        """Updates the cached states to those of `ids`."""
        known = min(len(ids), len(self._ids))
        if self._ids[:known] != list(ids[:known]):
            known = next(i for i in range(known) if self._ids[i] != ids[i])
        if known == len(ids):
            return  # states after `ids` may be used again
        del self._ids[known:], self._states[known + 1 :]
        for position in range(known, len(ids)):
            chain, fold = self._states[-1]
            chain = mix(mix(chain, ids[position]), position) & ~1
            self._states.append((chain, mix(fold, chain)))
            self._ids.append(ids[position])

    def wrong(
        self, prompt: Sequence[int], reply: Sequence[int], settings: Mapping[str, Any]
    ) -> str | None:
        """Checks a reply against the model.

        `continue_()` may remove a stop token of a reply and generate another token in its place.

        Args:
            prompt: Token ids before the reply.
            reply: Token ids of the reply.
            settings: Settings of the turn.

        Returns:
            A description of the first wrong token; None if all are right.
        """
        known = hash((*prompt, -1, *reply, repr(settings)))
        if known in self._right:
            return None
        given = {k: v for k, v in settings.items() if k in SAMPLING and k not in _LIMITS}
        params, _ = sampling_params(given, self._eos)
        longer, _ = sampling_params({**given, "min_new_tokens": 1}, self._eos)
        ids = [*prompt, *reply]
        stops = {*self._eos, *settings.get("stop_token_ids", ())}
        self._follow(ids)
        for at in range(len(prompt), len(ids)):
            logits = self.logits(ids[:at])
            token = _C.test_sample(logits, params, [], [], 0, at)[0]
            if token in stops and token != ids[at]:
                token = _C.test_sample(logits, longer, [], [], 0, at)[0]
            if token != ids[at]:
                return f"token {at - len(prompt)} of {len(reply)} is {ids[at]}, expected {token}"
        self._right.add(known)
        return None
