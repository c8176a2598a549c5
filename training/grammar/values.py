"""Values that facts are about, such as names and numbers, split into training and held-out ones."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Collection
from functools import cache

from training.grammar.wordings import TEXT, read_sections

# One word in eight is held out of training, by a hash, and with it every value that has it.
_HELD_OUT_OF = 8
# Classes too small to hold anything out. Both sides have all of their values.
CLOSED = frozenset({"day", "month", "planet", "room", "season", "size", "small_number"})

_WORD = re.compile(r"[a-z]+|[0-9]+")
_ONSETS = (
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr qu r s sc sh sk sl sm sn sp st "
    "t th tr tw v w wh y z"
).split()
_VOWELS = "a a a a e e e e i i i i o o o o u u u ai ea ee ie oo ou y".split()
_CODAS = "b ck d f ff g k l ll m n nd ng nt p r rd rk rn rt s sh ss st t th v x z".split()
_PLACES = "ton ville burg field ford port haven wick mouth stead dale bridge a o ia ez ik".split()
_STREETS = "Street Avenue Road Lane Drive Way Court".split()


def words_of(text: str) -> list[str]:
    """Returns the words and the numbers of `text`, in lower case."""
    return _WORD.findall(text.casefold())


@cache
def is_held_out(word: str) -> bool:
    """Returns whether `word`, in lower case, is in no chat to train on.

    That holds for one in eight of the words that no wording has, and never for digits alone.
    """
    if len(word) < 2 or word in spelled_out():
        return False
    return word in _only_held_out() or zlib.crc32(word.encode()) % _HELD_OUT_OF == 0


@cache
def pools() -> dict[str, tuple[str, ...]]:
    """Returns the listed values of each class, of both sides of the split."""
    found: dict[str, tuple[str, ...]] = {}
    for file in ("values.txt", "values_held_out.txt"):
        for name, some in _read_lists(file).items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *some)))
    return found


@cache
def _only_held_out() -> frozenset[str]:
    """Returns the words that only the list of held-out values has."""
    kept, trained = (
        {word for some in _read_lists(file).values() for value in some for word in words_of(value)}
        for file in ("values_held_out.txt", "values.txt")
    )
    return frozenset(kept - trained)


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
def spelled_out() -> frozenset[str]:
    """Returns the words of the wordings and of their slots, none of which is held out."""
    words: set[str] = set()
    for path in sorted(TEXT.glob("*.txt")):
        if path.name.startswith("values"):
            continue
        for section in read_sections(path):
            words.update(words_of(" ".join(said for _, said in section.declared)))
            for lines in section.parts.values():
                words.update(words_of(" ".join(lines)))
    return frozenset(words)


class Values:
    """Samples values of a class.

    Values to train on have no held-out word; the others have at least one, so they are in no chat
    to train on.

    Args:
        seen: words, in lower case, of other texts that are trained on. A held-out value has a word
            that is not among them.
        invents: probability that a value of an open class is a made-up word, which must be copied
            because it was never seen.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        held_out: bool = False,
        seen: Collection[str] = (),
        invents: float = 0.0,
    ) -> None:
        self.rng = rng
        self.held_out = held_out
        self._seen = seen
        self._invents = invents

    def draw(self, kind: str) -> str:
        """Samples a value of the class `kind`.

        Raises:
            KeyError: names an unknown class.
            LookupError: names a class without values on this side of the split.
        """
        if kind not in _MAKERS and kind not in pools():
            raise KeyError(f"value class {kind!r}, expected one of {', '.join(classes())}")
        for _ in range(10_000):
            value = self._any(kind)
            if kind in CLOSED or self._allowed(value):
                return value
        raise LookupError(
            f"no value of class {kind!r} is {'held out' if self.held_out else 'left'}"
        )

    def _allowed(self, value: str) -> bool:
        new = [word for word in words_of(value) if is_held_out(word)]
        return any(word not in self._seen for word in new) if self.held_out else not new

    def _any(self, kind: str) -> str:
        if self._invents and kind in _INVENTED and self.rng.random() < self._invents:
            made = _made(self.rng)
            return made.capitalize() if kind in _CAPITALS else made
        maker, listed = _MAKERS.get(kind), pools().get(kind)
        if listed and (maker is None or self.rng.random() < _LISTED.get(kind, 0.0)):
            return self.rng.choice(listed)
        assert maker is not None
        return maker(self.rng)


def classes() -> list[str]:
    """Names of the classes of values."""
    return sorted({*_MAKERS, *pools()})


def _listed(rng: random.Random, *kinds: str) -> str:
    return rng.choice(pools()[rng.choice(kinds)])


def _syllables(rng: random.Random, least: int, most: int) -> str:
    text = ""
    for _ in range(rng.randint(least, most)):
        text += (rng.choice(_ONSETS) if rng.random() < 0.9 else "") + rng.choice(_VOWELS)
    return text + (rng.choice(_CODAS) if rng.random() < 0.6 else "")


def _spliced(rng: random.Random) -> str:
    """Returns the start of one word joined to the end of another, with letter sequences of real
    words."""
    first, last = (_listed(rng, *_SPLICED).split()[-1].casefold() for _ in range(2))
    begin = first[: rng.randint(2, 5)]
    return begin + last[-rng.randint(2, 6) :]


def _made(rng: random.Random) -> str:
    """Returns a made-up word of three to twelve letters that no wording has."""
    while True:
        text = _spliced(rng) if rng.random() < 0.5 else _syllables(rng, 1, 3)
        if 3 <= len(text) <= 12 and text.isalpha() and text not in spelled_out():
            return text


def _name(rng: random.Random) -> str:
    return _made(rng).capitalize()


def _word(rng: random.Random) -> str:
    return _listed(rng, "object", "animal", "fruit", "flower") if rng.random() < 0.3 else _made(rng)


def _pet(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.3:
        return _listed(rng, "person")
    if roll < 0.5:
        source = _listed(rng, "word", "fruit", "color", "flower", "food", "tree")
        return source.split()[-1].capitalize()
    return _name(rng)


def _full_name(rng: random.Random) -> str:
    first = _listed(rng, "person") if rng.random() < 0.6 else _name(rng)
    last = _listed(rng, "surname") if rng.random() < 0.6 else _name(rng)
    return f"{first} {last}"


def _city(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return _name(rng)
    return _syllables(rng, 1, 2).capitalize() + rng.choice(_PLACES)


def _street(rng: random.Random) -> str:
    name = _name(rng) if rng.random() < 0.5 else _listed(rng, "tree").split()[-1].title()
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


def _shaped(*shapes: str) -> Callable[[random.Random], str]:
    """Returns a function that makes values of several words: one of `shapes`, in which {class} is a
    listed value."""

    def make(rng: random.Random) -> str:
        return re.sub(r"\{(\w+)\}", lambda kind: _part(kind[1], rng), rng.choice(shapes))

    return make


def _part(kind: str, rng: random.Random) -> str:
    words = _SHAPES.get(kind)
    return rng.choice(words.split()) if words else _listed(rng, kind)


# Words that longer values are made of.
_SHAPES = {
    "kind": "big small old new broken wooden plastic rusty tiny heavy striped spare folded shiny",
    "shade": "light dark pale bright deep soft",
    "taste": "fresh fried grilled spicy sweet smoked frozen roasted cold warm",
    "rank": "junior senior retired assistant chief deputy trainee freelance",
    "where": "behind under beside near inside above below",
    "doing": "painting fixing cleaning selling building repairing moving wrapping polishing",
    "do": "clean fix return sell pack polish move wrap borrow repair",
}

_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "age": _between(18, 90),
    "activity": _shaped("{doing} the {object}", "{doing} the {kind} {object}"),
    "band": _band,
    "big_number": lambda rng: str(rng.randint(100, 10 ** rng.randint(3, 5) - 1)),
    "brand": _name,
    "city": _city,
    "code": _code,
    "color": _shaped("{shade} {color}"),
    "company": _company,
    "date": _date,
    "destination": _shaped("{city}", "{country}"),
    "dish": _shaped("{food} with {food}", "{taste} {food}", "{fruit} soup", "{food} salad"),
    "errand": _shaped("{do} the {object}", "{do} the {kind} {object}"),
    "food": _shaped("{taste} {food}"),
    "full_name": _full_name,
    "hobby": _shaped("collecting {item}", "drawing {flower} pictures", "{doing} old {vehicle}s"),
    "item": _shaped("{taste} {item}", "{color} {item}"),
    "items": _items,
    "job": _shaped("{rank} {job}"),
    "number": _between(1, 99),
    "object": _shaped("{kind} {object}", "{color} {object}", "{material} {object}"),
    "person": _name,
    "pet": _pet,
    "price": _price,
    "small_number": _between(2, 12),
    "spot": _shaped(
        "{where} the {object}", "{where} the {kind} {object}", "in the {color} {object}"
    ),
    "street": _street,
    "team": lambda rng: f"{_name(rng)} {_name(rng)}s",
    "time": _time,
    "title": _title,
    "word": _word,
    "year": _between(1950, 2030),
}
# Open classes, and those of them whose values start with a capital.
_INVENTED = frozenset(
    "animal brand city color company country destination dish drink feeling flower food fruit "
    "game instrument item job language material nationality object shop sport tree vehicle "
    "word".split()
)
_CAPITALS = frozenset("brand city company country destination language nationality".split())
# Probability that a value comes from the list of its class if it also has a maker.
_LISTED = {
    "activity": 0.6,
    "band": 0.5,
    "brand": 0.5,
    "city": 0.6,
    "color": 0.8,
    "company": 0.6,
    "destination": 0.7,
    "dish": 0.6,
    "errand": 0.6,
    "food": 0.8,
    "hobby": 0.8,
    "item": 0.8,
    "job": 0.8,
    "object": 0.6,
    "person": 0.5,
    "pet": 0.4,
    "spot": 0.5,
    "team": 0.6,
    "word": 0.5,
}
# Classes whose words are split and joined to new ones.
_SPLICED = (
    "person",
    "surname",
    "city",
    "country",
    "animal",
    "object",
    "food",
    "word",
    "job",
    "tree",
)
