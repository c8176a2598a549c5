"""A baseline n-gram model: interpolated modified Kneser-Ney (Chen and Goodman 1998)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# For training texts without n-grams that occur once, twice or three times, where the discounts
# cannot be estimated.
_PLAIN_DISCOUNT = 0.5


@dataclass(frozen=True)
class _Level:
    """The n-grams of one length, sorted, with their discounted counts, and their contexts.

    For each context, `totals` is the sum of the counts of its n-grams, and `left` the share that
    discounting leaves for the next shorter context.
    """

    grams: Ints
    discounted: Floats
    contexts: Ints
    totals: Floats
    left: Floats

    @classmethod
    def of(cls, grams: Ints, counts: Ints, bits: int) -> _Level:
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        contexts, starts = np.unique(grams >> bits, return_index=True)
        totals = np.add.reduceat(counts, starts).astype(np.float64)
        left = np.add.reduceat(discounts, starts) / totals
        return cls(grams, counts - discounts, contexts, totals, left)

    def refined(self, grams: Ints, shorter: Floats, bits: int) -> Floats:
        """Returns the probabilities of `grams`, given those under the next shorter contexts."""
        context, known = _find(self.contexts, grams >> bits)
        gram, counted = _find(self.grams, grams)
        seen = np.where(counted, self.discounted[gram], 0.0) / self.totals[context]
        return np.where(known, seen + self.left[context] * shorter, shorter)


class NGram:
    """A model of sequences of symbols 0 to `symbols` - 1.

    The symbol `begin` precedes each sequence; it is in none and is never predicted. Lower orders
    count the different symbols before an n-gram instead of its occurrences.

    Raises:
        ValueError: the n-grams exceed 63 bits, or there is no training text.
    """

    def __init__(
        self, sequences: Iterable[Sequence[int]], *, symbols: int, begin: int, order: int
    ) -> None:
        self.order = order
        self.symbols = symbols
        self.begin = begin
        self._bits = (symbols - 1).bit_length()
        if self._bits * order > 63:
            raise ValueError(f"{order} symbols of {self._bits} bits, expected 63 bits at most")
        grams, counts = np.unique(self._grams(sequences), return_counts=True)
        if not len(grams):
            raise ValueError("no symbols to learn from, expected one at least")
        self._levels = [_Level.of(grams, counts, self._bits)]
        for length in range(order - 1, 0, -1):
            shorter = grams & ((1 << (self._bits * length)) - 1)
            grams, counts = np.unique(shorter, return_counts=True)
            self._levels.append(_Level.of(grams, counts, self._bits))
        self._levels.reverse()

    def probabilities(self, sequence: Sequence[int]) -> Floats:
        """Returns the probability of each symbol of `sequence`, given those before it."""
        grams = self._grams([sequence])
        found = np.full(len(grams), 1 / (self.symbols - 1))
        for length, level in enumerate(self._levels, 1):
            kept = grams & ((1 << (self._bits * length)) - 1)
            found = level.refined(kept, found, self._bits)
        return found

    def bits(self, sequence: Sequence[int]) -> float:
        """Returns the cost of `sequence`, in bits."""
        return float(-np.log2(self.probabilities(sequence)).sum())

    def _grams(self, sequences: Iterable[Sequence[int]]) -> Ints:
        """Returns each symbol as a number, in its lowest bits, with the `order` - 1 symbols before
        it above them."""
        start = np.full(self.order - 1, self.begin, np.int64)
        parts = [part for s in sequences for part in (start, np.asarray(s, np.int64))]
        stream = np.concatenate([start, *parts])
        length = len(stream) - len(start)
        grams = np.zeros(length, np.int64)
        for place in range(self.order):
            grams = (grams << self._bits) | stream[place : place + length]
        kept: Ints = grams[stream[len(start) :] != self.begin]
        return kept


def _discounts(counts: Ints) -> Floats:
    """Returns the discounts of counts 0, 1, 2, and 3 or more."""
    once, twice, thrice, four = (int((counts == n).sum()) for n in (1, 2, 3, 4))
    if not (once and twice and thrice):
        return np.array([0.0, *[_PLAIN_DISCOUNT] * 3])
    y = once / (once + 2 * twice)
    found = (1 - 2 * y * twice / once, 2 - 3 * y * thrice / twice, 3 - 4 * y * four / thrice)
    return np.array([0.0, *(min(max(d, 0.0), n) for n, d in enumerate(found, 1))])


def _find(sorted_keys: Ints, keys: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Returns the position of each of `keys`, and whether it is present."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return at, sorted_keys[at] == keys
