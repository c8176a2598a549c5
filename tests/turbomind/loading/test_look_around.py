"""Patterns with look-around: the same answers as Python's `re`, in bounded time."""

from __future__ import annotations

import random
import re

import pytest

from turbomind import ModelError
from turbomind.quant import look_around
from turbomind.quant.look_around import LookAround

ATOMS = (
    "a", "b", ".", r"\.", "[ab]", "[^a]", "[0-2]", r"[^\w.]", r"\d", r"\D", r"\w", r"\s", "xy", "^",
    "$", r"\b", r"\B", r"\A", r"\Z", "(?:a|b|)",
)  # fmt: skip
BEHIND = ("a", "ab", r"\.", "[ab]1", "x|y", r"\d\d")


def pattern(dice: random.Random, depth: int) -> str:
    """Returns a random pattern."""
    kind = dice.random()
    if depth == 0 or kind < 0.35:
        return dice.choice(ATOMS)
    inner = pattern(dice, depth - 1)
    if kind < 0.55:
        return inner + pattern(dice, depth - 1)
    if kind < 0.65:
        return f"(?:{inner}|{pattern(dice, depth - 1)})"
    if kind < 0.75:
        return f"({inner}){dice.choice(['*', '+', '?', '{2}', '{1,3}', '*?', '{0,2}?', '{2,}'])}"
    if kind < 0.93:
        return f"({dice.choice(['?=', '?!'])}{inner})"
    return f"({dice.choice(['?<=', '?<!'])}{dice.choice(BEHIND)})"


def test_matches_are_those_of_python() -> None:
    dice = random.Random(1)
    matches = 0
    for _ in range(4000):
        text = "".join(pattern(dice, 3) for _ in range(dice.randint(1, 3)))
        try:
            expected, ours = re.compile(text), LookAround(text)
        except re.error:  # such as a repeated anchor
            continue
        for _ in range(4):
            name = "".join(dice.choice("ab12.xy \n") for _ in range(dice.randint(1, 9)))
            assert ours(name) == bool(expected.match(name)), (text, name)
            matches += ours(name)
    assert matches > 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"(a)(?=\1)", "groupref is not supported"),
        ("(?i)a(?=b)", "flags are not supported"),
        ("(?=(?i:b))", "flags are not supported"),
        ("(?=(", "missing \\)"),
        ("(?=" * 5000, "recursion|unterminated"),
    ],
)
def test_other_patterns_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LookAround(text)


def test_a_pattern_that_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_around, "MAX_STEPS", 20_000)
    text = "(?:(?=(?:(?=(?:(?=a*)a*)*)a*)*)a*)*b"  # tried by Python's `re` for ever
    with pytest.raises(ModelError, match="takes more than 20000 steps"):
        LookAround(text)("a" * 200)
    short = LookAround(text)
    assert short("aab")
    with pytest.raises(ModelError, match="steps"):  # in all texts
        all(short("aab") for _ in range(20_000))
