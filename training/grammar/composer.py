"""Composes chats of the grammar's turns."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from training.grammar.chats import Chat, Check, Fact, Message
from training.grammar.recall import Recall, upper_first
from training.grammar.several import several, talk
from training.grammar.systems import System, draw_system
from training.grammar.talk import question, small_talk, story
from training.grammar.values import Values

_FORMS = ("upper", "lower", "suffix", "prefix", "polite")
_FOLLOWED = (*_FORMS, "named", "user_named", "role", "fact", "none")


def _fixed(recall: Recall, fact: Fact) -> bool:
    try:
        recall.fix(fact)
    except LookupError:
        return False
    return True


class Composer:
    """Makes chats. Equal arguments give equal chats in the same order.

    Args:
        seed: seed of all choices.
        held_out: whether facts have values that no chat made without it has.
        seen: words, in lower case, of other texts that are trained on; held-out values have other
            words too.
        quizzes: share of chats in which several facts are stated and then all asked for.
        fixes: probability that a fact of a quiz is corrected after another one is stated.
        openings: first messages of real dialogues with a reply, to stand between facts.
        invents: probability that a value of an open class is a made-up word.
        personas: whether an assistant that a system prompt names is never asked about memo.
    """

    def __init__(
        self,
        seed: int,
        *,
        held_out: bool = False,
        seen: Collection[str] = (),
        openings: Sequence[tuple[str, str]] = (),
        quizzes: float = 0.0,
        fixes: float = 0.15,
        invents: float = 0.0,
        personas: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.values = Values(self.rng, held_out=held_out, seen=seen, invents=invents)
        self.personas = personas
        self.openings = openings
        self.quizzes = quizzes
        self.fixes = fixes
        self._about = True  # whether this chat's assistant may be asked about memo

    def chat(self) -> Chat:
        """Returns a chat of any kind. Most are about facts."""
        self._about = True
        if self.quizzes and self.rng.random() < self.quizzes:
            return self.quiz()
        roll = self.rng.random()
        if roll < 0.02:
            return self.recall(self.rng.randint(20, 60))
        if roll < 0.62:
            return self.recall()
        if roll < 0.74:
            return self.several()
        if roll < 0.82:
            return self._formed(talk(self.values, self.rng), self._maybe_system())
        if roll < 0.93:
            return self.chatter()
        return self.systems()

    def recall(self, turns: int | None = None) -> Chat:
        """Returns a chat with facts stated and asked for among other turns; `turns` of the user, 2
        to 12 if None."""
        rng = self.rng
        recall, system = self._begin()
        wanted = turns or rng.choices(range(2, 13), (8, 10, 12, 12, 10, 8, 7, 5, 4, 3, 2))[0]
        most = rng.choices((1, 2, 3, 4, 6), (25, 25, 20, 20, 10))[0] if wanted < 20 else 12
        if rng.random() < 0.3:
            self._aside(recall)
        while recall.chat.turns < wanted - 1:
            self._turn(recall, most)
        self._ask(recall)
        return self._formed(recall.chat, system)

    def quiz(self) -> Chat:
        """Returns a chat with two to six facts among other turns, some of them corrected, then
        asked for."""
        rng = self.rng
        recall, system = self._begin()
        for _ in range(rng.choices((2, 3, 4, 5, 6), (20, 25, 25, 20, 10))[0]):
            if rng.random() < 0.4:
                self._aside(recall)
            recall.tell(joined=rng.random() < 0.1)
            if rng.random() < self.fixes:
                _fixed(recall, rng.choice(recall.facts))
        for fact in rng.sample(recall.facts, len(recall.facts)):
            if rng.random() < 0.25:
                self._aside(recall)
            if rng.random() < 0.1:
                _fixed(recall, fact)
            if rng.random() < 0.06:
                recall.ask_unknown()
            recall.ask(fact)
        return self._formed(recall.chat, system)

    def several(self) -> Chat:
        """Returns a chat with several facts in one message, then asked for, with other turns in
        between."""
        rng, chat = self.rng, Chat()
        for _ in range(rng.choice((0, 0, 1, 2))):
            self._filler(chat)
        told, asked = several(self.values, rng)
        before = chat.turns
        chat.add(*told)
        for turn in range(asked.turns):
            for _ in range(rng.choice((0, 0, 1, 1, 2)) if turn == 0 else rng.choice((0, 0, 0, 1))):
                self._filler(chat)
            first = len(chat.messages) - 2 * turn
            chat.add(*(message["content"] for message in asked.messages[2 * turn : 2 * turn + 2]))
            chat.checks += [
                Check(first + c.index, c.kind, c.value, c.stale, chat.turns - 1 - before)
                for c in asked.checks
                if c.index == 2 * turn + 1
            ]
        return self._formed(chat, self._maybe_system())

    def _begin(self) -> tuple[Recall, System | None]:
        """Returns the facts of a new chat. A third of the chats get a system prompt."""
        rng = self.rng
        system = None
        if rng.random() < 0.3:
            rules = rng.choice((("none",), ("none",), _FORMS, ("one_word",), ("named", "fact")))
            system = draw_system(self.values, rng, rules=rules)
            self._about = not (self.personas and system.rule == "named")
        short = bool(system and system.rule == "one_word")
        return Recall(Chat(), self.values, rng, short=short), system

    def remembered(self, distance: int, *, corrected: bool = False) -> Chat:
        """Returns a chat with a fact and, `distance` turns later (1: the next turn), the question
        for it, whose check is the last one. Other turns and facts stand in between. With a
        correction, that comes `distance` turns before the question."""
        while True:
            chat = Chat()
            recall = Recall(chat, self.values, self.rng)
            for _ in range(self.rng.choice((0, 0, 1))):
                self._filler(chat)
            recall.tell()
            fact = recall.facts[0]
            if not corrected or self._corrected(recall, fact):
                break
        for _ in range(distance - 1):
            self._between(recall)
        recall.ask(fact)
        return chat

    def _corrected(self, recall: Recall, fact: Fact) -> bool:
        """Corrects `fact` some turns later. Returns False if it has no other value."""
        for _ in range(self.rng.choice((0, 1, 2))):
            self._between(recall)
        return _fixed(recall, fact)

    def chatter(self) -> Chat:
        """Returns a chat of small talk, questions and stories, without facts to remember."""
        chat = Chat()
        for _ in range(self.rng.choices((1, 2, 3, 4, 5), (30, 25, 20, 15, 10))[0]):
            roll = self.rng.random()
            if roll < 0.2:
                for asked, reply in story(self.values, self.rng):
                    chat.add(asked, reply)
            else:
                chat.add(*(question if roll < 0.5 else small_talk)(self.rng))
        return self._formed(chat, self._maybe_system())

    def systems(self) -> Chat:
        """Returns a chat that follows its system prompt, in form or in what it states."""
        rng = self.rng
        system = draw_system(self.values, rng, rules=_FOLLOWED)
        self._about = not (self.personas and system.rule in ("named", "role"))
        chat = Chat()
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            self._filler(chat)
        chat = self._formed(chat, system)
        for _ in range(rng.choice((1, 1, 2))):
            asked = system.question(rng)
            if asked is None:
                chat.add(*self._shaped(small_talk(rng, about=self._about), system))
                continue
            line, answer, value = asked
            chat.add(line, upper_first(answer))
            check = Check(len(chat.messages) - 1, system.section.name, value, (), chat.turns)
            chat.checks.append(check)
        return chat

    def _maybe_system(self) -> System | None:
        if self.rng.random() < 0.7:
            return None
        return draw_system(self.values, self.rng, rules=("none", *_FORMS))

    def _turn(self, recall: Recall, most: int) -> None:
        """Adds one turn: a fact stated, corrected or asked for, or something else."""
        roll, facts = self.rng.random(), recall.facts
        if not facts or (roll < 0.4 and len(facts) < most):
            if not facts and roll < 0.08:
                recall.ask_unknown()
            else:
                recall.tell(joined=len(facts) + 1 < most and self.rng.random() < 0.2)
        elif roll < 0.5 and self.rng.random() < 0.5:
            if not _fixed(recall, self.rng.choice(facts)):
                self._aside(recall)
        elif roll < 0.75:
            self._ask(recall)
        else:
            self._aside(recall)

    def _ask(self, recall: Recall) -> None:
        roll = self.rng.random()
        if roll < 0.09 or not recall.facts:
            recall.ask_unknown()
        elif roll < 0.11 and not recall.short and recall.chat.turns > 2:
            recall.ask_all()
        else:
            recall.ask(recall.next_to_ask())

    def _between(self, recall: Recall) -> None:
        if self.rng.random() < 0.35 and len(recall.facts) < 5:
            recall.tell()
        else:
            self._aside(recall)

    def _aside(self, recall: Recall) -> None:
        """Adds a turn about something else, unless all answers are a bare value."""
        if not recall.short:
            self._filler(recall.chat)

    def _filler(self, chat: Chat) -> None:
        roll = self.rng.random()
        if roll < 0.55:
            chat.add(*small_talk(self.rng, about=self._about))
        elif roll < 0.75 or (not self.openings and roll < 0.97):
            chat.add(*question(self.rng))
        elif roll < 0.97:
            chat.add(*self.rng.choice(self.openings))
        else:
            chat.add(*story(self.values, self.rng)[0])

    def _shaped(self, turn: tuple[str, str], system: System) -> tuple[str, str]:
        return turn[0], system.form(turn[1])

    def _formed(self, chat: Chat, system: System | None) -> Chat:
        """Returns `chat` under a system prompt."""
        if system is None:
            return chat
        said: list[Message] = [{"role": "system", "content": system.text}]
        for message in chat.messages:
            reply = message["role"] == "assistant"
            text = system.form(message["content"]) if reply else message["content"]
            said.append({"role": message["role"], "content": text})
        checks = [Check(c.index + 1, c.kind, c.value, c.stale, c.distance) for c in chat.checks]
        return Chat(said, checks)
