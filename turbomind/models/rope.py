"""Rotary tables: inverse frequencies from the rope fields of a config.

Every scaling is folded into the table at load, so an angle depends on the position alone. The
arithmetic follows the reference implementations step by step in float32 (powers are taken in
double, then rounded), so tables agree with theirs to the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from turbomind.models.config import Fields
from turbomind.models.reference import rope_fields_read
from turbomind.params import integer, wrong

Float32 = npt.NDArray[np.float32]

MAX_CONTEXT = 1 << 28  # tokens; the core's bound
MAX_THETA = 1e12  # with the bound on factors, no scaled base leaves float32
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
PROPORTIONAL = "proportional"  # rotates a share of all frequencies of a head, not of its elements
OF_A_LENGTH = ("dynamic", "longrope")  # types whose table depends on a length


@dataclass(frozen=True)
class Rope:
    """One table. `inv_freq` has a float32 value per pair of rotated elements, head_dim / 2 unless a
    part of the head is rotated; `max_context` is in tokens. `interleaved` rotates neighbours, else
    elements in the two halves."""

    inv_freq: tuple[float, ...]
    attention_factor: float
    max_context: int
    interleaved: bool = field(default=False, metadata={"later": True})  # see `description`


@dataclass(frozen=True)
class RopeRules:
    """What a family's rope fields may hold.

    Attributes:
        types: The type that each accepted name stands for.
        partial: `partial_rotary_factor` may rotate the first part of a head only.
        of_images: Fields that change nothing for text.
    """

    types: Mapping[str, str] = field(default_factory=lambda: {name: name for name in TYPES})
    partial: bool = False
    of_images: tuple[str, ...] = ()


def _powers(base: float, dim: int) -> Float32:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Float32 = np.power(float(np.float32(base)), exponents.astype(np.float64)).astype(
        np.float32
    )
    return powers


def default_inv_freq(base: float, dim: int) -> Float32:
    """Returns 1 / base^(2i / dim) for i < dim / 2, float32 [dim / 2]."""
    table: Float32 = np.float32(1) / _powers(base, dim)
    return table


def dynamic_inv_freq(base: float, dim: int, factor: float, original: int, length: int) -> Float32:
    """Returns the NTK-scaled table for `length` tokens; the plain table up to `original`."""
    length = max(length, original)
    grown = (factor * length / original) - (factor - 1)
    return default_inv_freq(base * grown ** (dim / (dim - 2)), dim)


def llama3_inv_freq(
    base: float, dim: int, factor: float, low: float, high: float, original: int
) -> Float32:
    """Divides frequencies of long wavelengths by `factor`, with a smooth band to short ones."""
    plain = default_inv_freq(base, dim)
    # The reference divides a scalar by a tensor as reciprocal times scalar; so do we.
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / plain)
    long, short = wavelength > original / low, wavelength < original / high
    scaled = np.where(long, plain / np.float32(factor), plain)
    turns = np.float32(original) * (np.float32(1) / wavelength)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    band = (1 - smooth) * scaled / np.float32(factor) + smooth * scaled
    result: Float32 = np.where(~long & ~short, band, scaled).astype(np.float32)
    return result


def yarn_inv_freq(
    base: float,
    dim: int,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> Float32:
    """Divides frequencies of slow dimensions by `factor` (YaRN, arXiv:2309.00071)."""

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    share = 1 - ramp  # of the undivided frequency
    powers = _powers(base, dim)
    plain, divided = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    result: Float32 = (divided * (1 - share) + plain * share).astype(np.float32)
    return result


def proportional_inv_freq(base: float, dim: int, share: float, factor: float) -> Float32:
    """Returns the frequencies of the first `share` of the pairs of a head, divided by `factor`, and
    zeros, which rotate nothing, for the others."""
    rotated = int(share * dim // 2)
    table = np.zeros(dim // 2, np.float32)
    table[:rotated] = default_inv_freq(base, dim)[:rotated] / np.float32(factor)
    return table


def longrope_inv_freq(base: float, factors: Float32) -> Float32:
    """Divides each frequency by its factor (LongRoPE, arXiv:2402.13753)."""
    table: Float32 = np.float32(1) / (factors * _powers(base, 2 * len(factors)))
    return table


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.number("attention_factor", 1e-6, 1e4, None)
    one, other = rope.number("mscale", 0, 1e4, 0), rope.number("mscale_all_dim", 0, 1e4, 0)
    if given is not None:
        return float(given)
    return mscale(one) / mscale(other) if one and other else mscale(1.0)


def _rope_fields(fields: Fields) -> Fields:
    """Returns the object that describes the rotation, under its old or its new name."""
    new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    name = "rope_scaling" if old else "rope_parameters"
    values = old or new or {}
    if not isinstance(values, dict):
        raise fields.error(name, "an object or null")
    return Fields(values, f"{fields.where}: {name}", fields.ignored)


def read_rope(
    fields: Fields, rules: RopeRules, head_dim: int, max_positions: int, length: int | None
) -> Rope:
    """Reads the rope fields of a config.

    Args:
        fields: The config.
        rules: What the family accepts.
        head_dim: Elements of a head.
        max_positions: max_position_embeddings, in tokens.
        length: Tokens that a table of a type in OF_A_LENGTH is computed for; None for others.

    Raises:
        ModelError: A type or key is not supported.
        InvalidRequest: `length` is wrong.
    """
    rope = _rope_fields(fields)
    old = rope.raw("type")  # what older files call the type
    name = "type" if old is not None and rope.raw("rope_type") is None else "rope_type"
    kind = rules.types[rope.choice(name, tuple(rules.types), "default")]
    outer = fields.number("rope_theta", 1.0001, MAX_THETA, 1e4)
    base = rope.number("rope_theta", 1.0001, MAX_THETA, outer)
    if length is not None and kind not in OF_A_LENGTH:
        kinds = " and ".join(map(repr, OF_A_LENGTH))
        expected = f"None: this model's rotation is {kind!r}, only {kinds} depend on a length"
        raise wrong("rope_length", length, expected)
    dim = head_dim if kind == PROPORTIONAL else _rotated(rope, fields, rules, head_dim)
    table, attention, context = _build(kind, rope, fields, base, dim, max_positions, length)
    fields.raw("original_max_position_embeddings")  # which only some types use
    for name in rules.of_images:
        rope.raw(name)
    rope.finish(rope_fields_read(kind), f"{rope.where.rpartition(' ')[2]}.")
    return Rope(tuple(float(f) for f in table), attention, min(context, MAX_CONTEXT))


def _rotated(rope: Fields, fields: Fields, rules: RopeRules, head_dim: int) -> int:
    """Returns how many elements of a head are rotated; the inner one of two fields wins."""
    name = "partial_rotary_factor"
    outer = fields.number(name, 0, 1, 1.0)
    holder = fields if rope.raw(name) is None else rope
    factor = rope.number(name, 0, 1, outer)
    if not rules.partial and factor != 1.0:
        raise holder.error(name, "1.0")
    rotated = int(head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise holder.error(name, f"a share of the {head_dim} elements of a head that is even")
    return rotated


def _build(
    kind: str,
    rope: Fields,
    fields: Fields,
    base: float,
    dim: int,
    max_positions: int,
    length: int | None,
) -> tuple[Float32, float, int]:
    """Returns (inverse frequencies, attention factor, longest context in tokens)."""
    if kind == "default":
        return default_inv_freq(base, dim), 1.0, max_positions
    if kind == PROPORTIONAL:
        share = rope.number("partial_rotary_factor", 0, 1, 1.0)
        factor = rope.number("factor", 1, 1e4, 1.0)
        return proportional_inv_freq(base, dim, share, factor), 1.0, max_positions
    if kind == "longrope":
        return _build_longrope(rope, fields, base, dim, max_positions, length)
    if (
        kind == "yarn"
        and rope.raw("factor") is None
        and rope.raw("original_max_position_embeddings")
    ):
        factor = max_positions / rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    else:
        factor = rope.number("factor", 1, 1e4)
    if kind == "linear":
        # max_position_embeddings is the trained length; the factor multiplies it.
        return default_inv_freq(base, dim) / np.float32(factor), 1.0, int(max_positions * factor)
    if kind == "dynamic":
        if dim < 4:
            raise fields.error("head_dim", "at least 4 with dynamic rope scaling")
        return _build_dynamic(base, dim, factor, max_positions, length)
    original = _original_length(rope, fields, max_positions)
    if kind == "llama3":
        low = rope.number("low_freq_factor", 1e-6, 1e6)
        high = rope.number("high_freq_factor", 1e-6, 1e6)
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor, {low:g}")
        context = max_positions if max_positions > original else int(original * factor)
        return llama3_inv_freq(base, dim, factor, low, high, original), 1.0, context
    fast = rope.number("beta_fast", 0, 1e6, 0) or 32.0
    slow = rope.number("beta_slow", 0, 1e6, 0) or 1.0
    truncate = rope.flag("truncate", True)
    table = yarn_inv_freq(base, dim, factor, original, fast, slow, truncate)
    return table, _yarn_attention_factor(rope, factor), max(max_positions, int(original * factor))


def _original_length(rope: Fields, fields: Fields, max_positions: int) -> int:
    """Returns the length of training, in tokens. The top-level field wins, as in the reference."""
    name = "original_max_position_embeddings"
    inside = rope.integer(name, 2, MAX_CONTEXT, max_positions)
    original: int = fields.integer(name, 2, MAX_CONTEXT, inside)
    return original


def _build_dynamic(
    base: float, dim: int, factor: float, original: int, length: int | None
) -> tuple[Float32, float, int]:
    if length is None:
        return default_inv_freq(base, dim), 1.0, original
    length = integer("rope_length", length, original, MAX_CONTEXT)
    return dynamic_inv_freq(base, dim, factor, original, length), 1.0, length


def _build_longrope(
    rope: Fields, fields: Fields, base: float, dim: int, max_positions: int, length: int | None
) -> tuple[Float32, float, int]:
    """Builds the table of sequences of `length` tokens, by default of `max_positions`.

    The reference changes tables, and with them the meaning of the KV, where a sequence grows past
    `original`. Here a model has one table: that of the long sequences if `length` allows them.
    """
    original = _original_length(rope, fields, max_positions)
    if length is None:
        length = max_positions
    length = integer("rope_length", length, 1, max_positions)
    factors = {name: _factors(rope, name, dim // 2) for name in ("long_factor", "short_factor")}
    factor = rope.number("factor", 1e-6, 1e6, max_positions / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention = rope.number("attention_factor", 1e-6, 1e4, attention)
    name = "long_factor" if length > original else "short_factor"
    return longrope_inv_freq(base, factors[name]), attention, length


def _factors(rope: Fields, name: str, count: int) -> Float32:
    values = rope.raw(name)
    known = isinstance(values, list) and all(
        type(value) in (int, float) and 1e-6 <= value <= 1e6 for value in values
    )
    if not known or len(values) != count:
        raise rope.error(name, f"{count} numbers from 1e-06 to 1e+06")
    return np.array(values, np.float32)
