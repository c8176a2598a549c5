"""Turns without facts: small talk, simple questions, stories."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from training.grammar.casual import casually
from training.grammar.values import Values
from training.grammar.wordings import TEXT, Section, choose, fill, read_sections

# Slots of stories whose values may come from the grammar's classes too.
_STORY_CLASSES = {"name": "person", "name2": "person", "animal": "animal", "color": "color"}


def small_talk(rng: random.Random, *, about: bool = True) -> tuple[str, str]:
    """Returns a message of little content, with good or bad news, or (`about`) a question about
    memo itself, and a reply."""
    file = rng.choices(("smalltalk.txt", "about.txt", "care.txt"), (60, 22 * about, 18))[0]
    return _pair(rng.choice(_sections(file)), rng)


def question(rng: random.Random) -> tuple[str, str]:
    """Returns a simple question about the world, and its answer."""
    return _pair(rng.choice(_sections("questions.txt")), rng)


def story(values: Values, rng: random.Random) -> list[tuple[str, str]]:
    """Returns a request for a story, the story, and up to two questions about it with their
    answers."""
    listed, *stories = _sections("stories.txt")
    section = rng.choice(stories)
    slots = {name: _story_value(name, words, values) for name, words in listed.parts.items()}
    while slots["name"] == slots["name2"]:
        slots["name2"] = _story_value("name2", listed.parts["name2"], values)
    wish = casually(choose(rng.choice(section.parts["ask"]), rng), rng, asks=False)
    told = choose(rng.choice(section.parts["story"]), rng)
    turns = [(fill(wish, slots), fill(told, slots))]
    follow = section.parts.get("follow", [])
    for line in rng.sample(follow, min(len(follow), rng.choice((0, 1, 1, 2)))):
        asked, _, answer = line.partition("=>")
        asked = casually(choose(asked.strip(), rng), rng, asks=True)
        turns.append((fill(asked, slots), fill(choose(answer.strip(), rng), slots)))
    return [(user, reply[:1].upper() + reply[1:]) for user, reply in turns]


def _story_value(slot: str, words: Sequence[str], values: Values) -> str:
    kind = _STORY_CLASSES.get(slot)
    if kind is None or (not values.held_out and values.rng.random() < 0.5):
        return values.rng.choice(words)
    # The stories say "a {animal}".
    drawn = (values.draw(kind) for _ in range(1000))
    return next(value for value in drawn if value[0].lower() not in "aeiou")


def _pair(section: Section, rng: random.Random) -> tuple[str, str]:
    asked = choose(rng.choice(section.parts["user"]), rng)
    return (
        casually(asked, rng, asks=asked.endswith("?")),
        choose(rng.choice(section.parts["reply"]), rng),
    )


@cache
def _sections(name: str) -> Sequence[Section]:
    return tuple(read_sections(TEXT / name))
