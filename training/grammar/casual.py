"""Casual spelling: lower case, no full stop, an opener, a slip. Slots are left unchanged."""

from __future__ import annotations

import random
import re

_OPENERS = (
    "By the way, |Oh, |Hey, |So, |Well, |Okay, |Quick question: |Just so you know, |Hmm, |Also, |"
    "Anyway, |Oh and |Right, |Actually, |Listen, |Now, |One more thing: |Please, |Alright, |"
    "btw |ok |um, |hm "
).split("|")
_TELL_ONLY = {"Just so you know, ", "One more thing: ", "Oh and ", "Listen, ", "Also, "}
_ASK_ONLY = {"Quick question: ", "Please, "}
_TAILS = (" :)", " lol", " haha", " thanks", " please", "...", "!!", " ok?", " ;)")
_KEPT = re.compile(r"^(I\b|I'|\{|[A-Z]{2}|[A-Z]\w*day\b)")
_CHATTY = (
    ("you ", "u "),
    ("you're", "youre"),
    ("what's", "whats"),
    ("i'm", "im"),
    ("don't", "dont"),
    ("it's", "its"),
    ("that's", "thats"),
    ("please", "pls"),
    ("my name is", "my names"),
    ("because", "cuz"),
)


def casually(line: str, rng: random.Random, *, asks: bool, opens: bool = True) -> str:
    """Returns `line` as one of many users might type it, with its slots still to be filled.

    Args:
        asks: whether it is a question.
        opens: whether something like "By the way," may precede it.
    """
    if opens and rng.random() < 0.22:
        line = _open(line, rng, asks)
    roll = rng.random()
    if roll < 0.25:
        line = _lower(line)
        if rng.random() < 0.4:
            for polished, chatty in _CHATTY:
                line = line.replace(polished, chatty)
    elif roll < 0.65:
        line = _upper_first(line)
        if line[-1].isalnum() or line[-1] == "}":
            line += "?" if asks else "."
    if rng.random() < 0.25:
        line = line.rstrip(".!?") or line
    if rng.random() < 0.05:
        line = line.rstrip(".") + rng.choice(_TAILS)
    if rng.random() < 0.04:
        line = _slip(line, rng)
    return line


def _open(line: str, rng: random.Random, asks: bool) -> str:
    barred = _TELL_ONLY if asks else _ASK_ONLY
    return behind(rng.choice([opener for opener in _OPENERS if opener not in barred]), line)


def behind(opener: str, line: str) -> str:
    """Returns `line` in the form in which it continues after `opener`."""
    return opener + (line if _KEPT.match(line) else line[0].lower() + line[1:])


def _upper_first(line: str) -> str:
    return line[0].upper() + line[1:]


def _lower(line: str) -> str:
    pieces = re.split(r"(\{[^}]*\})", line)
    return "".join(piece if piece.startswith("{") else piece.lower() for piece in pieces)


def _slip(line: str, rng: random.Random) -> str:
    """Swaps two letters of one word."""
    words = list(re.finditer(r"(?<![{\w])[a-z]{4,}(?![\w}])", line))
    if not words:
        return line
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    return line[:at] + line[at + 1] + line[at] + line[at + 2 :]
