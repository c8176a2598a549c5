"""Facts in a chat: stated, corrected, asked for, and asked for without having been stated."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache

from training.grammar.casual import behind, casually
from training.grammar.chats import Chat, Check, Fact
from training.grammar.values import Values
from training.grammar.wordings import TEXT, Kind, Section, choose, fill, read_sections

# Slot words with the same meaning. A chat has only one of them.
_SAME = (
    {"mother", "mom", "mum"},
    {"father", "dad"},
    {"dog", "puppy"},
    {"cat", "kitten", "cats", "kittens"},
    {"horse", "pony"},
    {"grandmother", "grandma"},
    {"grandfather", "grandpa"},
    {"wife", "husband", "partner", "girlfriend", "boyfriend", "fiancee"},
    {"turtle", "tortoise"},
    {"coworker", "colleague"},
)
_AGAIN = ("", "", "", "Sure! ", "Of course. ", "Yes, I remember. ", "Sure. ", "Easy. ")
_SHORT = ("Noted.", "Okay.", "Understood.", "Sure.", "Remembered.")
_JOINTS = ("", "", "Also, ", "And ", "Oh, and ", "Plus, ")


@cache
def kinds() -> tuple[Kind, ...]:
    """Returns all kinds of facts. Sections of one name in several files are one kind."""
    merged: dict[str, Section] = {}
    for path in sorted(TEXT.glob("facts_*.txt")):
        for section in read_sections(path):
            known = merged.setdefault(section.name, section)
            if known is not section:
                for part, lines in section.parts.items():
                    known.parts.setdefault(part, []).extend(lines)
    return tuple(Kind.of(section) for section in merged.values())


class Recall:
    """The facts of one chat, and the turns about them."""

    def __init__(self, chat: Chat, values: Values, rng: random.Random, *, short: bool = False):
        self.chat = chat
        self.values = values
        self.rng = rng
        self.facts: list[Fact] = []
        self.short = short  # answers are the bare value, acknowledgements a word
        self._asked: set[int] = set()
        self._kinds = {kind.name: kind for kind in kinds()}

    def tell(self, *, joined: bool = False) -> None:
        """Adds a turn with a fact that is new in this chat; `joined`: two facts in one message."""
        first, kind = self._new_fact()
        self._remember(first)
        line = self._say(kind, "tell", first, asks=False)
        replying = kind, first
        if joined:
            second, other = self._new_fact()
            self._remember(second)
            joint = self.rng.choice(_JOINTS)
            line = line if line[-1] in ".!?" else line + "."
            line += " " + self._say(other, "tell", second, asks=False, joint=joint)
            replying = self.rng.choice([replying, (other, second)])
        self._asked.discard(id(first))
        self.chat.add(line, self._reply(replying[0], "ack", replying[1]))

    def fix(self, fact: Fact) -> None:
        """Adds a turn that corrects `fact`.

        Raises:
            LookupError: it has no other value.
        """
        kind = self._kinds[fact.kind]
        new = self._unlike(kind, fact)
        latest = max(self.facts, key=lambda other: other.told)
        lines = kind.parts["fix"]
        if fact is not latest or fact.told < self.chat.turns - 1 or self._told_with(fact):
            lines = tuple(line for line in lines if line in kind.clear_fixes) or lines
        fact.values.append(new)
        line = self._fill(self.rng.choice(lines), fact, asks=False)
        fact.told = self.chat.turns
        self._asked.discard(id(fact))
        self.chat.add(line, self._reply(kind, "fix_ack", fact))

    def ask(self, fact: Fact) -> None:
        """Adds a question for `fact`, whose answer is checked."""
        kind = self._kinds[fact.kind]
        line = self._say(kind, "ask", fact, asks=True)
        again = self.rng.choice(_AGAIN) if self.rng.random() < 0.3 else ""
        answer = yours(fact.value) if self.short else again + self._reply(kind, "answer", fact)
        self._asked.add(id(fact))
        distance = self.chat.turns - fact.told
        self.chat.add(line, upper_first(answer) if not self.short else answer)
        index = len(self.chat.messages) - 1
        stale = tuple(value for value in fact.values[:-1] if value != fact.value)
        self.chat.checks.append(Check(index, fact.kind, fact.value, stale, distance))

    def ask_unknown(self) -> None:
        """Adds a question for a fact that was never stated."""
        fact, kind = self._new_fact()
        line = self._say(kind, "ask", fact, asks=True)
        self.chat.add(line, "Unknown." if self.short else self._reply(kind, "unknown", fact))

    def ask_all(self) -> None:
        """Adds a question for all facts so far. The answer has up to three of them."""
        told = self.facts[-3:]
        parts = []
        for fact in told:
            kind = self._kinds[fact.kind]
            full = [
                line for line in kind.parts["answer"] if line.startswith("You") and line[-1] == "."
            ]
            if full:
                parts.append(self._plain(self.rng.choice(full), fact))
        if parts:
            self.chat.add(casually(self.rng.choice(_ASK_ALL), self.rng, asks=True), " ".join(parts))

    def next_to_ask(self) -> Fact:
        """Returns a fact to ask for, mostly one not asked for since it was stated."""
        fresh = [fact for fact in self.facts if id(fact) not in self._asked]
        return self.rng.choice(fresh if fresh and self.rng.random() < 0.8 else self.facts)

    def _told_with(self, fact: Fact) -> bool:
        return any(other is not fact and other.told == fact.told for other in self.facts)

    def _new_fact(self) -> tuple[Fact, Kind]:
        for _ in range(200):
            if self.facts and self.rng.random() < 0.35:
                kind = self._kinds[self.rng.choice(self.facts).kind]
                if not kind.slots:
                    continue
            else:
                kind = self.rng.choice(kinds())
            try:
                fact = self._fact_of(kind)
            except LookupError:
                continue
            if fact is not None:
                return fact, kind
        raise ValueError("no fact is left that differs from those told")

    def _fact_of(self, kind: Kind) -> Fact | None:
        """Returns a fact of `kind`, or None if it could be confused with one of this chat."""
        slots = {name: self._slot(words) for name, words in kind.slots.items()}
        if kind.slots.get("w") == "@person" and self.rng.random() < 0.4:
            slots["w"] = self._known_person() or slots["w"]
        fact = Fact(kind.name, slots, [], self.chat.turns)
        if any(self._clash(fact, other) for other in self.facts):
            return None
        fact.values.append(self._unlike(kind, fact))
        return fact

    def _known_person(self) -> str | None:
        """Returns a person about whom another fact was stated."""
        known = [fact.slots["w"] for fact in self.facts if "w" in fact.slots]
        return self.rng.choice(known) if known else None

    def _remember(self, fact: Fact) -> None:
        self.facts.append(fact)

    def _slot(self, words: Mapping[str, str] | str) -> str:
        return self.values.draw(words[1:]) if isinstance(words, str) else self.rng.choice([*words])

    def _value_class(self, kind: Kind, fact: Fact) -> str:
        words = kind.slots.get(kind.value, kind.value)
        return words if isinstance(words, str) else words[fact.slots[kind.value]]

    def _unlike(self, kind: Kind, fact: Fact) -> str:
        """Returns a value that contains no value of this chat and is contained in none."""
        taken = [v for other in [*self.facts, fact] for v in (*other.values, *other.slots.values())]
        for _ in range(200):
            value = self.values.draw(self._value_class(kind, fact))
            low = value.casefold()
            if not any(low in old.casefold() or old.casefold() in low for old in taken):
                return value
        raise LookupError(f"no value of {kind.name} is left that differs from those told")

    def _clash(self, one: Fact, two: Fact) -> bool:
        if one.kind == two.kind and one.slots == two.slots:
            return True
        words_one, words_two = set(one.slots.values()), set(two.slots.values())
        if one.kind == two.kind:
            return any(words_one & same and words_two & same for same in _SAME)
        return frozenset((one.kind, two.kind)) in _twins()

    def _say(self, kind: Kind, part: str, fact: Fact, *, asks: bool, joint: str = "") -> str:
        return self._fill(self.rng.choice(kind.parts[part]), fact, asks=asks, joint=joint)

    def _fill(self, line: str, fact: Fact, *, asks: bool, joint: str = "") -> str:
        said = casually(choose(line, self.rng), self.rng, asks=asks)
        filling = self._filling(fact)
        if said == said.lower() and self.rng.random() < 0.2:
            filling = {slot: _typed_low(value) for slot, value in filling.items()}
        return fill(behind(joint, said) if joint else said, filling)

    def _reply(self, kind: Kind, part: str, fact: Fact) -> str:
        if self.short and part in ("ack", "fix_ack"):
            return self.rng.choice(_SHORT)
        return self._plain(self.rng.choice(kind.parts[part]), fact)

    def _plain(self, line: str, fact: Fact) -> str:
        words = {name: yours(value) for name, value in self._filling(fact).items()}
        said = fill(choose(line, self.rng), words)
        return re.sub(r"(?<=[.!?] )[a-z]", lambda first: first[0].upper(), upper_first(said))

    def _filling(self, fact: Fact) -> dict[str, str]:
        old = fact.values[-2] if len(fact.values) > 1 else ""
        return {"v": fact.value, "old": old, **fact.slots}


def yours(value: str) -> str:
    """Returns `value` as the assistant states it to the user, with "your" for "my"."""
    return re.sub(r"\b(my|our)\b", "your", value)


def _typed_low(value: str) -> str:
    """Returns `value` in lower case, unless it is a code."""
    return value.lower() if value.replace(" ", "").isalpha() else value


def upper_first(text: str) -> str:
    """Returns `text` with a capital first letter."""
    return text[:1].upper() + text[1:]


# Kinds whose questions could be about each other's facts.
_TWIN_GROUPS: Sequence[Sequence[str]] = (
    ("own_name", "full_name", "call_me", "nickname"),
    ("pet_kind", "pet_name", "pet_color", "pet_age", "pet_count", "dog_name", "cat_name"),
    ("pet_name", "thing_name", "person_pet_name"),
    ("home_city", "home_town", "birth_country", "moving_to", "moved_country"),
    ("street", "place_street", "hotel_street", "parked_street"),
    ("relative_name", "sister_name", "brother_name", "boss_name", "baby_name"),
    ("favorite", "favorite_creature", "favorite_color", "favorite_food"),
    ("thing_color", "car_color", "wearing_color", "wall_color", "nail_polish"),
    ("thing_place", "keys_place", "treasure_spot"),
    ("place_number", "travel_number", "hotel_room_number", "keep_ticket_number", "phone_extension"),
    ("appointment_day", "dentist_day", "deadline_day", "package_day", "pickup_day"),
    ("code_of", "wifi_password", "keep_code", "keep_lock_code", "keep_special_word"),
    ("remember_word", "keep_word", "keep_special_word", "secret_word", "wifi_password"),
    ("remember_number", "keep_number", "keep_ticket_number", "lucky_number"),
    ("remember_thing", "keep_color", "keep_city", "keep_object", "keep_date"),
    ("keep_name", "keep_contact", "nickname"),
    ("trip_destination", "dream_trip", "event_city", "party_host"),
    ("trip_day", "trip_month", "train_time"),
    ("team_name", "own_team", "project_name", "thing_name"),
    ("party_guests", "guest_count"),
    ("book_page", "page_number"),
    ("gift_bought", "gift_for"),
    ("lost_object", "story_storm_loss", "found_object", "story_bench_find"),
    ("instrument", "plays_instrument", "learn_goal", "language_learning"),
    ("native_language", "speaks_language", "language_learning"),
    ("met_person", "story_market_man", "who_called", "visitor", "meeting_with"),
    ("dinner_plan", "breakfast", "baked_pie", "story_wrong_dish"),
    ("garden_tree", "planted_tree"),
    ("drink_order", "person_drink"),
    ("reading_now", "story_train_reader", "movie_tonight"),
)


@cache
def _twins() -> frozenset[frozenset[str]]:
    return frozenset(
        frozenset((one, two))
        for group in _TWIN_GROUPS
        for one in group
        for two in group
        if one != two
    )


_ASK_ALL = (
    "What do you know about me?",
    "What have I told you so far?",
    "Tell me what you remember.",
    "Can you sum up what I told you?",
    "What do you remember from our chat?",
    "Remind me of what I said.",
    "List what I told you.",
    "what did i tell you",
)
