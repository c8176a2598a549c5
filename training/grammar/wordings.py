"""Reads the files of wordings and fills their lines.

A file has sections: `== name` starts one, `-- part` a list of lines in it, `key: value` before the
first part declares something, `#` starts a comment. In a line `[a|b|]` is one of the alternatives,
`{x}` a slot and `{a:x}` a slot with "a" or "an" in front.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TEXT = Path(__file__).parent / "text"

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(a:)?(\w+)\}")
_WORD = re.compile(r"[a-z]{4,}")


@dataclass
class Section:
    """A section: its declarations, and the lines of its parts."""

    name: str
    declared: list[tuple[str, str]] = field(default_factory=list)
    parts: dict[str, list[str]] = field(default_factory=dict)


def read_sections(path: Path) -> list[Section]:
    """Returns the sections of a file, in its order.

    Raises:
        ValueError: names a line with wrong syntax.
    """
    sections: list[Section] = []
    part: list[str] | None = None
    for number, raw in enumerate(path.read_text("ascii").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("== "):
            sections.append(Section(line[3:].strip()))
            part = None
        elif line.startswith("-- ") and sections:
            part = sections[-1].parts.setdefault(line[3:].strip(), [])
        elif part is not None:
            part.append(line)
        elif sections and ":" in line:
            key, _, value = line.partition(":")
            sections[-1].declared.append((key.strip(), value.strip()))
        else:
            raise ValueError(f"{path.name}:{number}: expected '== name' or '-- part', saw {line!r}")
    return sections


def choose(line: str, rng: random.Random) -> str:
    """Returns `line` with one alternative of each choice, without superfluous spaces."""
    while _CHOICE.search(line):
        line = _CHOICE.sub(lambda found: rng.choice(found.group(1).split("|")), line)
    return re.sub(r" {2,}", " ", line).replace(" ,", ",").strip()


def slots_of(line: str) -> set[str]:
    """Returns the names of the slots of `line`."""
    return {name for _, name in _SLOT.findall(line)}


def fill(line: str, values: Mapping[str, str]) -> str:
    """Returns `line` with its slots filled.

    Raises:
        KeyError: names a slot without a value.
    """
    return _SLOT.sub(lambda found: with_article(values[found[2]], found[1]), line)


def with_article(value: str, wanted: str | None = "a") -> str:
    """Returns `value` after "a" or "an", by its first letter, or unchanged if it takes no
    article."""
    if not wanted:
        return value
    sounds_open = value[:1].lower() in "aeio" or value[:2].lower() in ("um", "un", "ug", "ul", "up")
    return ("an " if sounds_open and value[:3].lower() not in ("one", "uni") else "a ") + value


@dataclass(frozen=True)
class Kind:
    """A kind of fact: the class of its value, its slots, and its lines.

    `slots` maps a slot to its words, each with the class of value it stands for ("" if none), or to
    a class of values, written "@class".
    """

    name: str
    value: str
    slots: Mapping[str, Mapping[str, str] | str]
    parts: Mapping[str, tuple[str, ...]]
    # Corrections that name the fact that they correct.
    clear_fixes: frozenset[str]

    @classmethod
    def of(cls, section: Section) -> Kind:
        """Returns the kind that a section describes.

        Raises:
            ValueError: names what is missing.
        """
        slots: dict[str, Mapping[str, str] | str] = {}
        value = ""
        for key, said in section.declared:
            if key == "value":
                value = said
            elif key.startswith("slot "):
                slots[key[5:].strip()] = said if said.startswith("@") else _words(said)
            else:
                raise ValueError(f"{section.name}: expected value or slot, saw {key!r}")
        parts = {part: tuple(lines) for part, lines in section.parts.items()}
        for part in ("tell", "ack", "fix", "fix_ack", "ask", "answer", "unknown"):
            if not parts.get(part):
                raise ValueError(f"{section.name}: expected lines of {part!r}, saw none")
        known = {"v", "old", *slots}
        for part, lines in parts.items():
            for line in lines:
                if slots_of(line) - known:
                    raise ValueError(f"{section.name}: {part}: unknown slot in {line!r}")
        return cls(section.name, value, slots, parts, frozenset(_clear(parts, set(slots))))


def _words(said: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in said.split("|"))
    return {word.strip(): kind.strip() for word, _, kind in pairs}


def _clear(parts: Mapping[str, tuple[str, ...]], slots: set[str]) -> Iterator[str]:
    """Returns the corrections with the old value, a slot, or a word that questions for this kind
    share."""
    asked = [set(_WORD.findall(line.lower())) for line in parts["ask"]]
    for line in parts["fix"]:
        words = set(_WORD.findall(line.lower())) - {"actually", "that", "what", "said", "told"}
        shared = any(sum(word in ask for ask in asked) * 4 >= len(asked) for word in words)
        if shared or slots_of(line) & (slots | {"old"}):
            yield line
