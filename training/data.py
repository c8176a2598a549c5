"""Batches to train on: chats of the grammar and real dialogues, tokenized, of similar lengths."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import corpora
from training.grammar import Chat, Composer
from training.grammar.chats import Message
from training.grammar.recall import yours
from training.tokenizer import ASSISTANT, END, SYSTEM, USER, id_of, render

# Tokens sampled at once, then sorted by length into the batches of one chunk.
_CHUNK = 1 << 19
# First chunk of a run that starts from the weights of another. No first run reaches it.
BEHIND = 1000
# Approximate characters of a grammar chat per token.
_CHARACTERS = 2.7


@dataclass(frozen=True)
class Phase:
    """The mix of training data from chunk `begins` on.

    Attributes:
        begins: the first chunk of the phase.
        real: share of the tokens that come from real dialogues.
        answers: weight of a reply that answers a question for a fact.
        values: weight of the fact's value in it.
        quizzes: share of the grammar's chats that are quizzes.
        fixes: probability that a fact of a quiz is corrected after another one is stated.
        invents, personas: see `Composer`.
    """

    begins: int
    real: float
    answers: float
    values: float
    quizzes: float
    fixes: float = 0.15
    invents: float = 0.0
    personas: bool = False


# First to speak, then to remember. Only values weigh more, because the wording of an answer is
# arbitrary.
_PHASES = (
    Phase(0, real=0.35, answers=1.0, values=6.0, quizzes=0.35, fixes=0.3),
    Phase(12, real=0.15, answers=1.0, values=6.0, quizzes=0.65, fixes=0.5),
    # Starting from a finished run: values that must be copied.
    Phase(
        BEHIND,
        real=0.15,
        answers=1.0,
        values=6.0,
        quizzes=0.6,
        fixes=0.5,
        invents=0.35,
        personas=True,
    ),
)


@dataclass(frozen=True)
class Weighed:
    """A chat, and the weights of predicting each message and the next speaker.

    `spans` are parts of messages with their own weight: (message, begin, end, weight), in
    characters.
    """

    messages: Sequence[Message]
    weights: Sequence[float]
    between: float
    spans: Sequence[tuple[int, int, int, float]] = ()


@dataclass(frozen=True)
class Sample:
    """The tokens of a chat, and for each position the weight of predicting the next one."""

    ids: list[int]
    weights: list[float]


class Mixture:
    """The training data as chunks, each reproducible from the seed and its number."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, seed: int, context: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._context = context
        self._real = [
            chat
            for corpus in corpora.CORPORA
            for chat in corpora.read(folder, corpus) * corpus.repeats
        ]
        self._openings = openings(folder)
        some = random.Random(seed).sample(self._real, min(500, len(self._real)))
        lengths = [len(text.ids) for text in tokenizer.encode_batch([render(c) for c in some])]
        self._mean_length = sum(lengths) / len(lengths)
        self._epoch, self._order = -1, [0]

    def chunk(self, number: int, batch_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the batches of a chunk: (tokens, weights), each (rows, length), padded with
        zeros."""
        rng = random.Random(f"{self._seed}:{number}")
        chats = [*self._composed(number), *self._dialogues(number)]
        samples = tokens_of(chats, self._tokenizer, self._context)
        rng.shuffle(samples)
        samples.sort(key=lambda sample: len(sample.ids) // 16)
        batches = list(_batches(samples, batch_tokens))
        rng.shuffle(batches)
        return batches

    def _composed(self, number: int) -> Iterator[Weighed]:
        phase = _phase(number)
        composer = Composer(
            self._seed * 1_000_003 + number,
            openings=self._openings,
            quizzes=phase.quizzes,
            fixes=phase.fixes,
            invents=phase.invents,
            personas=phase.personas,
        )
        characters = 0
        while characters < _CHUNK * (1 - phase.real) * _CHARACTERS:
            chat = composer.chat()
            characters += sum(len(message["content"]) for message in chat.messages)
            yield composed(chat, phase)

    def _dialogues(self, number: int) -> Iterator[Weighed]:
        """Returns the chunk's share of an endless sequence of all real dialogues, shuffled for each
        pass."""
        counts = [round(_CHUNK * _phase(n).real / self._mean_length) for n in range(number + 1)]
        for place in range(sum(counts[:-1]), sum(counts)):
            epoch, index = divmod(place, len(self._real))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self._real)))
                random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            yield real(self._real[self._order[index]])


def _phase(number: int) -> Phase:
    return [phase for phase in _PHASES if phase.begins <= number][-1]


def openings(folder: Path) -> list[tuple[str, str]]:
    """Returns the short first messages of the small-talk sets, with their replies."""
    found = []
    for corpus in corpora.CORPORA:
        if corpus.name in ("microsoft_personality_chat", "chatterbot_corpus_english"):
            for chat in corpora.read(folder, corpus):
                first, second = (message["content"] for message in chat[:2])
                if len(first) < 100 and len(second) < 160 and "\n" not in second:
                    found.append((first, second))
    return found


def composed(chat: Chat, phase: Phase) -> Weighed:
    """Returns a chat of the grammar. Only replies have weight; those that answer for a fact have
    the phase's."""
    asked = {check.index for check in chat.checks}
    weights = [
        0.0 if message["role"] != "assistant" else phase.answers if index in asked else 1.0
        for index, message in enumerate(chat.messages)
    ]
    spans = []
    for check in chat.checks:
        value = yours(check.value).casefold()
        found = chat.messages[check.index]["content"].casefold().rfind(value)
        if found >= 0:
            spans.append((check.index, found, found + len(value), phase.values))
    return Weighed(chat.messages, weights, 0.0, spans)


def real(messages: Sequence[Message]) -> Weighed:
    """Returns a real dialogue. Every message has weight except a system prompt."""
    weights = [float(message["role"] != "system") for message in messages]
    return Weighed(messages, weights, 1.0)


def tokens_of(chats: Sequence[Weighed], tokenizer: Tokenizer, context: int) -> list[Sample]:
    """Returns the samples of `chats`, truncated to `context` tokens."""
    encoded = tokenizer.encode_batch([render(list(chat.messages)) for chat in chats])
    roles = {id_of(tokenizer, token) for token in (SYSTEM, USER, ASSISTANT)}
    end = id_of(tokenizer, END)
    return [
        _sample(text.ids[:context], text.offsets, chat, roles, end)
        for text, chat in zip(encoded, chats, strict=True)
    ]


def _sample(
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    chat: Weighed,
    roles: Collection[int],
    end: int,
) -> Sample:
    each: list[float] = []
    begins: list[int] = []  # by message, in characters
    weight = chat.between
    for token, (_, behind) in zip(ids, offsets, strict=False):
        if token in roles:
            weight = chat.weights[len(begins)]
            begins.append(behind)
        elif token == end:
            weight = chat.between
        each.append(weight)
    for message, first, last, weight in chat.spans:
        if message < len(begins):
            span = range(begins[message] + first, begins[message] + last)
            # The weight of a token stands one position earlier, where it is predicted.
            for at, (_, behind) in enumerate(offsets[1 : len(ids)]):
                if behind - 1 in span:
                    each[at] = weight
    return Sample(ids, each)


def _batches(samples: Sequence[Sample], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows: list[Sample] = []
    for sample in samples:
        longest = max([len(row.ids) for row in rows] + [len(sample.ids)])
        if rows and longest * (len(rows) + 1) > tokens:
            yield _padded(rows)
            rows = []
        rows.append(sample)
    yield _padded(rows)


def _padded(rows: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        weights[index, : len(row.weights)] = torch.tensor(row.weights)
    return ids, weights
