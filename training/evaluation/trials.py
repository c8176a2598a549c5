"""Chats that end with a question for a fact, in the grammar's and in independent wordings."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training import corpora
from training.grammar import Chat, Composer, Values, is_held_out
from training.grammar.values import words_of
from training.grammar.wordings import fill

DISTANCES = 6
"""Largest distance of a question from its fact, in user turns."""

Novelty = Literal["new", "common", "closed"]
"""How new a value is to training. "new": it has a word that is in no text that is trained on.
"common": no chat of the grammar has it, but its words are in real dialogues, as numbers are.
"closed": chats have it, because its class is too small to hold a value out."""

# Probability that a turn in between states another fact.
_OTHER_FACTS = 1 / 3
_ATTEMPTS = 100


@dataclass(frozen=True)
class Trial:
    """The user's messages, the last a question that `value` answers, without any of `stale`.

    `distance` is the number of user turns since `value` was stated (1: the turn before).
    """

    users: tuple[str, ...]
    kind: str
    value: str
    stale: tuple[str, ...]
    distance: int
    novelty: Novelty


@dataclass(frozen=True)
class FactWordings:
    """Lines by which a kind of fact is stated, corrected and asked for. `value` is the class of its
    values.

    In a line `{v}` is the value, `{a:v}` the value with its article, `{old}` the value before.
    """

    kind: str
    value: str
    tell: tuple[str, ...]
    fix: tuple[str, ...]
    ask: tuple[str, ...]


@dataclass(frozen=True)
class Wordings:
    """Facts, and lines that stand between them."""

    facts: tuple[FactWordings, ...]
    fillers: tuple[str, ...]


def read_wordings(name: str) -> Wordings:
    """Returns the set of wordings "a", "b" or "c"."""
    path = Path(__file__).parent / f"wordings_{name}.json"
    read = json.loads(path.read_text("utf-8"))
    facts = (
        FactWordings(
            kind=fact["kind"],
            value=fact["value"],
            tell=tuple(fact["tell"]),
            fix=tuple(fact["fix"]),
            ask=tuple(fact["ask"]),
        )
        for fact in read["facts"]
    )
    return Wordings(tuple(facts), tuple(read["fillers"]))


def seen_words(dialogues: Path) -> frozenset[str]:
    """Returns the words, in lower case, of the real dialogues that are trained on."""
    return frozenset(
        word
        for chat in corpora.read_all(dialogues)
        for message in chat
        for word in re.findall(r"[a-z]+", message["content"].casefold())
    )


def of_grammar(
    count: int, seed: int, seen: Collection[str], *, corrected: bool = False
) -> list[Trial]:
    """Returns `count` held-out chats of the grammar, evenly over all distances."""
    return [
        _of_composer(f"{seed}:{number}", 1 + number % DISTANCES, seen, corrected)
        for number in range(count)
    ]


def _of_composer(key: str, distance: int, seen: Collection[str], corrected: bool) -> Trial:
    rng = random.Random(key)
    for _ in range(_ATTEMPTS):
        chat = _composed(rng.getrandbits(64), distance, seen, corrected)
        check = chat.checks[-1] if chat else None
        # A correction to the same value would be none.
        if chat and check and bool(check.stale) == corrected:
            said = tuple(m["content"] for m in chat.messages if m["role"] == "user")
            new = novelty(check.value, seen)
            return Trial(said, check.kind, check.value, check.stale, check.distance, new)
    raise ValueError(f"no chat in {_ATTEMPTS} attempts")


def _composed(seed: int, distance: int, seen: Collection[str], corrected: bool) -> Chat | None:
    """Returns a chat. A class without unseen words uses seen ones; None if it has no values
    left."""
    for words in (seen, ()):
        with contextlib.suppress(LookupError):
            composer = Composer(seed, held_out=True, seen=words)
            return composer.remembered(distance, corrected=corrected)
    return None


def of_wordings(
    wordings: Wordings, count: int, seed: int, seen: Collection[str], *, corrected: bool = False
) -> list[Trial]:
    """Returns `count` chats in these wordings with held-out values, evenly over distances and
    kinds."""
    rng, facts = random.Random(seed), wordings.facts
    rounds = count // len(facts) + 1
    order = [fact for _ in range(rounds) for fact in rng.sample(facts, len(facts))]
    return [
        _Writer(wordings, random.Random(f"{seed}:{number}"), seen).trial(
            order[number], 1 + number % DISTANCES, corrected
        )
        for number in range(count)
    ]


class _Writer:
    """Writes one chat in given wordings."""

    def __init__(self, wordings: Wordings, rng: random.Random, seen: Collection[str]) -> None:
        self._rng = rng
        self._seen = seen
        # Tried in this order: words of no dialogue, held-out values, any values.
        self._values = (
            Values(rng, held_out=True, seen=seen),
            Values(rng, held_out=True),
            Values(rng),
        )
        self._taken: list[str] = []
        self._fillers = rng.sample(wordings.fillers, len(wordings.fillers))
        self._others = rng.sample(wordings.facts, len(wordings.facts))

    def trial(self, fact: FactWordings, distance: int, corrected: bool) -> Trial:
        self._others = [other for other in self._others if other.kind != fact.kind]
        value = self._draw(fact.value)  # first, so that it gets the rarest value
        if corrected:
            old = self._draw(fact.value)
            said = [self._line(fact.tell, old)]
            if self._rng.random() < 0.5:
                said.append(self._fillers.pop())
            said.append(self._line(fact.fix, value, old))
        else:
            said = [self._line(fact.tell, value)]
        said += [self._between() for _ in range(distance - 1)]
        said.append(self._rng.choice(fact.ask))
        stale = (old,) if corrected else ()
        new = novelty(value, self._seen)
        return Trial(tuple(said), fact.kind, value, stale, distance, new)

    def _between(self) -> str:
        if self._rng.random() < _OTHER_FACTS:
            other = self._others.pop()
            return self._line(other.tell, self._draw(other.value))
        return self._fillers.pop()

    def _line(self, lines: Sequence[str], value: str, old: str = "") -> str:
        return fill(self._rng.choice(lines), {"v": value, "old": old})

    def _draw(self, kind: str) -> str:
        """Samples a value of a class that contains no other value of the chat and is contained in
        none."""
        for values in self._values:
            for _ in range(50):
                try:
                    value = values.draw(kind)
                except LookupError:
                    break
                low = value.casefold()
                if not any(low in old or old in low for old in self._taken):
                    self._taken.append(low)
                    return value
        raise ValueError(f"no value of class {kind!r} differs from {self._taken}")


def novelty(value: str, seen: Collection[str]) -> Novelty:
    """Returns how new `value` is to training; `seen` are the words of the dialogues.

    Returns:
        "closed" for a value without held-out words, "common" if the dialogues have all of these,
        else "new".
    """
    held_out = [word for word in words_of(value) if is_held_out(word)]
    if not held_out:
        return "closed"
    known = (word.isdigit() or word in seen for word in held_out)
    return "common" if all(known) else "new"
