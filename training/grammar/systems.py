"""System prompts: those that change the form of every reply, and those that state a fact."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from training.grammar.casual import casually
from training.grammar.values import Values
from training.grammar.wordings import TEXT, Section, choose, fill, read_sections

# Sources of slot values, for slots that the section does not list itself.
_CLASSES = {
    ("named", "v"): "person",
    ("user_named", "v"): "person",
    ("role", "job"): "job",
    ("role", "company"): "company",
    ("fact_opening", "v"): "time",
    ("fact_closing", "v"): "time",
    ("fact_city", "v"): "city",
    ("fact_price", "v"): "price",
    ("fact_wifi", "v"): "code",
    ("fact_special", "v"): "dish",
    ("fact_phone", "v"): "big_number",
    ("fact_boss", "v"): "person",
}
_SLOTS = ("v", "s", "job", "company")


@dataclass(frozen=True)
class System:
    """A system prompt: its text, its rule, and its effect on a reply."""

    text: str
    rule: str
    values: dict[str, str]
    section: Section
    form: Callable[[str], str]

    def question(self, rng: random.Random) -> tuple[str, str, str] | None:
        """Returns a question about a statement of the prompt, its answer and the value in it, if
        any."""
        parts = self.section.parts
        asks = [part for part in parts if part.startswith("ask")]
        if not asks:
            return None
        part = rng.choice(asks)
        topic = part.removeprefix("ask")
        line = casually(choose(rng.choice(parts[part]), rng), rng, asks=True)
        answer = choose(rng.choice(parts["answer" + topic]), rng)
        value = self.values[{"_place": "company", "_job": "job"}.get(topic, "v")]
        return fill(line, self.values), self.form(fill(answer, self.values)), value


def draw_system(values: Values, rng: random.Random, *, rules: tuple[str, ...] = ()) -> System:
    """Samples a system prompt, from `rules` if any are given."""
    sections = [s for s in _sections() if not rules or _rule(s) in rules]
    section = rng.choice(sections)
    drawn = {}
    for slot in _SLOTS:
        listed = section.parts.get(slot)
        kind = _CLASSES.get((section.name, slot))
        if kind and (not listed or values.held_out or rng.random() < 0.7):
            drawn[slot] = values.draw(kind)
        elif listed:
            drawn[slot] = rng.choice(listed)
    text = fill(choose(rng.choice(section.parts["system"]), rng), drawn)
    return System(text, _rule(section), drawn, section, _form(_rule(section), drawn.get("s", "")))


@cache
def _sections() -> tuple[Section, ...]:
    return tuple(read_sections(TEXT / "system.txt"))


def _rule(section: Section) -> str:
    return dict(section.declared)["rule"]


def _form(rule: str, said: str) -> Callable[[str], str]:
    if rule == "upper":
        return str.upper
    if rule == "lower":
        return str.lower
    if rule == "suffix":
        return lambda reply: f"{reply} {said}"
    if rule == "prefix":
        return lambda reply: f"{said} {reply}"
    if rule == "polite":
        return lambda reply: _address(reply, said)
    return lambda reply: reply


def _address(reply: str, title: str) -> str:
    end = len(reply.rstrip(".!?"))
    return f"{reply[:end]}, {title}{reply[end:] or '.'}"
