"""Names, numbers and other values that facts are about, those to train on and those held out."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection
from functools import cache

from training.grammar.wordings import TEXT, read_sections

# One value in eight is held out of training, by a hash of its text.
_HELD_OUT_OF = 8
# Classes too small to hold anything out: every one of their values is in both.
CLOSED = frozenset({"day", "month", "season", "planet", "size", "small_number"})

# Classes whose values are words of longer values, which are held out as a whole.
_PARTS = frozenset(
    {"color", "flower", "food", "fruit", "person", "surname", "title_word", "tree", "word"}
)

_ONSETS = (
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sc sh sk sl sm sn sp st "
    "t th tr tw v w wh y z"
).split()
_VOWELS = "a a a a e e e e i i i i o o o o u u u ai ea ee ie oo ou y".split()
_CODAS = "b ck d f ff g k l ll m n nd ng nt p r rd rk rn rt s sh ss st t th v x z".split()
_PLACES = "ton ville burg field ford port haven wick mouth stead dale bridge a o ia ez ik".split()
_STREETS = "Street Avenue Road Lane Drive Way Court".split()


def is_held_out(value: str) -> bool:
    """Whether `value` is kept out of training chats."""
    return zlib.crc32(value.casefold().encode()) % _HELD_OUT_OF == 0


@cache
def pools() -> dict[str, tuple[str, ...]]:
    """The listed values of each class."""
    return {name: tuple(dict.fromkeys(some)) for name, some in _read_lists("values.txt").items()}


@cache
def held_out_pools() -> dict[str, tuple[str, ...]]:
    """Values that only held-out chats use; none of them is a word of the other texts."""
    words = spelled_out() | listed_words()
    return {
        name: tuple(v for v in some if not (_made_of(v, words) or v in pools().get(name, ())))
        for name, some in _read_lists("values_held_out.txt").items()
    }


def _read_lists(file: str) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (TEXT / file).read_text("ascii").splitlines():
        if line.startswith("== "):
            current = lists.setdefault(line[3:].strip(), [])
        elif line.strip() and not line.startswith("#"):
            current.extend(value for value in (part.strip() for part in line.split(",")) if value)
    return lists


@cache
def _written() -> str:
    """All wordings with the words of their slots, and all listed values, a line each."""
    lines = [value for values in pools().values() for value in values]
    for path in sorted(TEXT.glob("*.txt")):
        if not path.name.startswith("values"):
            lines += path.read_text("ascii").splitlines()
    return "\n".join(["", *lines, ""]).casefold()


@cache
def _is_inside(value: str) -> bool:
    """Whether `value` is in a wording, a slot or a longer listed value."""
    text, low = _written(), value.casefold()
    if low not in text:
        return False
    found = re.finditer(rf"(?<!\w){re.escape(low)}(?!\w)", text)
    return any(not text[at.start() - 1] == text[at.end()] == "\n" for at in found)


def _is_new(made: str) -> bool:
    """Whether no training chat has a value that was made up and held out, inside a longer one.

    Names of one syllable are made again and again, in companies and teams too, and a street of
    the same name has a number elsewhere.
    """
    name, _, last = made.partition(" ")
    if last and last not in _STREETS:
        return True
    if last and name.casefold() in listed_words():
        return False
    syllables = re.findall(r"[aeiouy]+", name.casefold())
    return not name.isalpha() or (len(name) >= 5 and len(syllables) >= 2)


@cache
def spelled_out() -> frozenset[str]:
    """Words of the wordings themselves: a value among them is never held out."""
    words: set[str] = set()
    for path in sorted(TEXT.glob("*.txt")):
        if path.name.startswith("values"):
            continue
        for section in read_sections(path):
            for lines in section.parts.values():
                words.update(re.findall(r"[a-z]+", " ".join(lines).casefold()))
    return frozenset(words)


@cache
def listed_words() -> frozenset[str]:
    """Words of the listed values that are not held out."""
    listed = " ".join(
        value
        for name, values in pools().items()
        for value in values
        if name in _PARTS or not (name in CLOSED or is_held_out(value))
    )
    return frozenset(re.findall(r"[a-z]+", listed.casefold()))


def _made_of(value: str, *words: Collection[str]) -> bool:
    parts = re.findall(r"[a-z]+", value.casefold())
    return bool(parts) and all(any(part in some for some in words) for part in parts)


class Values:
    """Draws values of a class, none of them from the other side of the split.

    `seen` are words, in lower case, that a held-out value must not be: those of other texts that
    are trained on.
    """

    def __init__(
        self, rng: random.Random, *, held_out: bool = False, seen: Collection[str] = ()
    ) -> None:
        self.rng = rng
        self.held_out = held_out
        self._seen = seen

    def draw(self, kind: str) -> str:
        """A value of the class `kind`. KeyError names a class that is not known, LookupError one
        that has none on this side of the split.
        """
        if kind not in _MAKERS and kind not in pools():
            raise KeyError(f"value class {kind!r}, expected one of {', '.join(classes())}")
        fresh = self._fresh(kind) if self.held_out else []
        if fresh and self.rng.random() < 0.5:
            return self.rng.choice(fresh)
        for _ in range(10_000):
            value = self._any(kind)
            if kind in CLOSED or self._allowed(kind, value):
                return value
        if fresh:
            return self.rng.choice(fresh)
        raise LookupError(
            f"no value of class {kind!r} is {'held out' if self.held_out else 'left'}"
        )

    def _fresh(self, kind: str) -> list[str]:
        return [v for v in held_out_pools().get(kind, ()) if not _made_of(v, self._seen)]

    def _allowed(self, kind: str, value: str) -> bool:
        if not self.held_out:
            return not is_held_out(value) or _made_of(value, spelled_out())
        if not is_held_out(value) or _made_of(value, spelled_out()):
            return False
        if kind == "item" or _is_inside(value) or (kind in _MAKERS and not _is_new(value)):
            return False  # training has all items in its lists of them
        # Of several words, it is their combination that is new.
        return " " in value or not _made_of(value, listed_words(), self._seen)

    def _any(self, kind: str) -> str:
        maker = _MAKERS.get(kind)
        listed = pools().get(kind)
        if maker is None or (listed and self.rng.random() < _LISTED.get(kind, 0.0)):
            assert listed is not None
            return self.rng.choice(listed)
        return maker(self.rng)


def classes() -> list[str]:
    """The classes of values."""
    return sorted({*_MAKERS, *pools()})


def _syllables(rng: random.Random, least: int, most: int) -> str:
    text = ""
    for _ in range(rng.randint(least, most)):
        text += (rng.choice(_ONSETS) if rng.random() < 0.9 else "") + rng.choice(_VOWELS)
    return text + (rng.choice(_CODAS) if rng.random() < 0.6 else "")


def _name(rng: random.Random) -> str:
    return _syllables(rng, 1, 3).capitalize()


def _word(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(pools()[rng.choice(("object", "animal", "fruit", "flower"))])
    return _syllables(rng, 2, 3)


def _pet(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.3:
        return rng.choice(pools()["person"])
    if roll < 0.5:
        source = rng.choice(("word", "fruit", "color", "flower", "food", "tree"))
        return rng.choice(pools()[source]).split()[-1].capitalize()
    return _name(rng)


def _full_name(rng: random.Random) -> str:
    first = rng.choice(pools()["person"]) if rng.random() < 0.6 else _name(rng)
    last = rng.choice(pools()["surname"]) if rng.random() < 0.6 else _name(rng)
    return f"{first} {last}"


def _city(rng: random.Random) -> str:
    return _syllables(rng, 1, 2).capitalize() + rng.choice(_PLACES)


def _street(rng: random.Random) -> str:
    name = _name(rng) if rng.random() < 0.5 else rng.choice(pools()["tree"]).split()[-1].title()
    number = f"{rng.randint(1, 400)} " if rng.random() < 0.6 else ""
    return f"{number}{name} {rng.choice(_STREETS)}"


def _company(rng: random.Random) -> str:
    return f"{_name(rng)} {rng.choice(('Foods', 'Labs', 'Motors', 'Press', 'Group', 'Systems'))}"


def _title(rng: random.Random) -> str:
    words = pools()["title_word"]
    first, second = rng.choice(words), rng.choice(words)
    shapes = ("The {} {}", "{} {}", "{} of {}", "The {} and the {}", "A {} for {}")
    return rng.choice(shapes).format(first, second)


def _band(rng: random.Random) -> str:
    return f"The {_name(rng)}s" if rng.random() < 0.4 else f"{_name(rng)} {_name(rng)}"


def _code(rng: random.Random) -> str:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
    letter = "".join(rng.choice(letters) for _ in range(rng.randint(1, 3)))
    shapes = (
        digits,
        letter + digits,
        digits + letter,
        f"{letter}-{digits}",
        f"{digits[:2]}-{digits}",
    )
    return rng.choice(shapes)


def _time(rng: random.Random) -> str:
    hour, minute = rng.randint(1, 12), rng.choice((0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55))
    half = rng.choice(("am", "pm"))
    word = "one two three four five six seven eight nine ten eleven twelve".split()[hour - 1]
    shapes = (
        f"{hour} {half}",
        f"{hour}:{minute:02} {half}",
        f"{hour}:{minute:02}",
        f"{hour} o'clock",
        f"half past {word}",
        f"quarter to {word}",
        f"quarter past {word}",
    )
    return rng.choice(shapes)


def _date(rng: random.Random) -> str:
    month, day = rng.choice(pools()["month"]), rng.randint(1, 28)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day not in (11, 12, 13) else 0, "th")
    shapes = (f"{month} {day}", f"{month} {day}{ending}", f"the {day}{ending} of {month}")
    return rng.choice(shapes)


def _items(rng: random.Random) -> str:
    chosen = rng.sample(pools()["item"], rng.choice((2, 3, 3)))
    return ", ".join(chosen[:-1]) + f" and {chosen[-1]}"


def _between(least: int, most: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(least, most))


def _price(rng: random.Random) -> str:
    amount = rng.choice((rng.randint(2, 99), rng.randint(100, 2000)))
    return rng.choice((f"${amount}", f"${amount}", f"{amount} dollars", f"{amount} euros"))


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "age": _between(18, 90),
    "band": _band,
    "big_number": lambda rng: str(rng.randint(100, 10 ** rng.randint(3, 5) - 1)),
    "brand": _name,
    "city": _city,
    "code": _code,
    "company": _company,
    "date": _date,
    "full_name": _full_name,
    "items": _items,
    "number": _between(1, 99),
    "person": _name,
    "pet": _pet,
    "price": _price,
    "small_number": _between(2, 12),
    "street": _street,
    "team": lambda rng: f"{_name(rng)} {_name(rng)}s",
    "time": _time,
    "title": _title,
    "word": _word,
    "year": _between(1950, 2030),
}
# How often a value comes from the list of its class, where there is one beside its maker.
_LISTED = {
    "band": 0.5,
    "brand": 0.5,
    "city": 0.6,
    "company": 0.6,
    "person": 0.5,
    "pet": 0.4,
    "team": 0.6,
    "word": 0.5,
}
