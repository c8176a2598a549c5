"""Chats in which one message states several facts, and talks of several turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

from training.grammar.casual import casually
from training.grammar.chats import Chat, Check
from training.grammar.recall import upper_first, yours
from training.grammar.values import Values, words_of
from training.grammar.wordings import TEXT, Section, choose, fill, read_sections, slots_of

# Slots of talks and the classes of their values.
_TALK_SLOTS = {"name": "person"}


def several(values: Values, rng: random.Random) -> tuple[tuple[str, str], Chat]:
    """Returns a message that states several facts with its reply, and a chat of two to four
    questions for them, with its checks."""
    section = rng.choice(_sections("sets.txt"))
    slots = _drawn({name[5:].strip(): said for name, said in section.declared}, values)
    told = fill(casually(choose(rng.choice(section.parts["tell"]), rng), rng, asks=False), slots)
    follow, chat = section.parts["follow"], Chat()
    for line in rng.sample(follow, min(len(follow), rng.choice((2, 2, 3, 4)))):
        asked, _, answer = line.partition("=>")
        question = fill(casually(choose(asked.strip(), rng), rng, asks=True), slots)
        chat.add(question, upper_first(fill(choose(answer.strip(), rng), slots)))
        _check(chat, section.name, [slots[name] for name in sorted(slots_of(answer))], told)
    ack = upper_first(fill(choose(rng.choice(section.parts["ack"]), rng), slots))
    return (told, ack), chat


def talk(values: Values, rng: random.Random) -> Chat:
    """Adds a talk about one topic, of several turns. It may ask for something that the user
    named."""
    section = rng.choice(_sections("talks.txt"))
    lines = section.parts["turns"]
    names = sorted({name for line in lines for name in slots_of(line)})
    slots = _drawn({name: "@" + _TALK_SLOTS.get(name, name) for name in names}, values)
    chat, told = Chat(), ""
    for asked, reply in zip(lines[::2], lines[1::2], strict=True):
        line = choose(asked.removeprefix("U:").strip(), rng)
        line = casually(line, rng, asks=line.endswith("?"), opens=False)
        told += "\n" + fill(line, slots)
        chat.add(fill(line, slots), fill(choose(reply.removeprefix("A:").strip(), rng), slots))
        _check(chat, section.name, [slots[name] for name in sorted(slots_of(reply))], told)
    return chat


def _check(chat: Chat, kind: str, named: Sequence[str], told: str) -> None:
    """Adds checks of the last reply for the stated values in it that its question does not have."""
    asked, reply = (message["content"] for message in chat.messages[-2:])
    for value in named:
        if _has(told, value) and _has(reply, yours(value)) and not _has(asked, value):
            chat.checks.append(Check(len(chat.messages) - 1, kind, value, (), chat.turns))


def _has(text: str, value: str) -> bool:
    words, wanted = words_of(text), words_of(value)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


def _drawn(declared: Mapping[str, str], values: Values) -> dict[str, str]:
    """Samples a value for each slot, none of which contains another."""
    while True:
        slots = {
            name: values.draw(said[1:])
            if said.startswith("@")
            else values.rng.choice(said.split("|")).strip()
            for name, said in declared.items()
        }
        low = [value.casefold() for value in slots.values()]
        if not any(one in two for at, one in enumerate(low) for two in low[:at] + low[at + 1 :]):
            return slots
        if any(len(value) < 2 for value in low) and len(set(low)) == len(low):
            return slots  # a digit may be part of a longer number


@cache
def _sections(name: str) -> Sequence[Section]:
    return tuple(read_sections(TEXT / name))
