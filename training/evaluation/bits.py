"""Bits per byte of held-out dialogues: of the model, of 5-gram models and of xz."""

from __future__ import annotations

import lzma
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmchat import ChatEngine
from training import corpora
from training.evaluation.ngram import NGram
from training.evaluation.play import side_by_side
from training.grammar.chats import Message
from training.tokenizer import BEGIN, render

ORDER = 5
# Symbols after the bytes of a message, and before a dialogue.
_END, _BEGIN = 256, 257
_XZ = 9 | lzma.PRESET_EXTREME

Dialogue = list[Message]


@dataclass(frozen=True)
class Sample:
    """Held-out dialogues of each corpus, and the dialogues that the n-grams are trained on."""

    held_out: dict[str, list[Dialogue]]
    training: list[Dialogue]

    @classmethod
    def draw(cls, folder: Path, seed: int, each: int, training: int | None) -> Sample:
        """Samples at most `each` held-out dialogues of a corpus, and `training` dialogues (None:
        all)."""
        held_out = {
            corpus.name: _some(corpora.read(folder, corpus, held_out=True), seed, each)
            for corpus in corpora.CORPORA
        }
        learnt = corpora.read_all(folder)
        return cls(held_out, learnt if training is None else _some(learnt, seed, training))


def _some(dialogues: list[Dialogue], seed: int, most: int) -> list[Dialogue]:
    return random.Random(seed).sample(dialogues, min(most, len(dialogues)))


@dataclass(frozen=True)
class Bits:
    """Bits per byte of message text, of one corpus or of all."""

    dialogues: int
    bytes: int
    model: float
    tokens_5gram: float
    bytes_5gram: float


def text_bytes(dialogues: Iterable[Dialogue]) -> int:
    """Returns the size of the messages, in bytes of UTF-8."""
    return sum(len(m["content"].encode()) for dialogue in dialogues for m in dialogue)


def measure(engine: ChatEngine, sample: Sample) -> dict[str, Bits]:
    """Returns bits per byte by corpus, and of "all".

    The model and the 5-gram over its tokens include the cost of tokens for roles and ends of
    messages, the 5-gram over bytes that of the ends. A dialogue longer than the context is left
    out.
    """
    fitting = {name: _fitting(engine, kept) for name, kept in sample.held_out.items()}
    order = [(name, dialogue) for name, kept in fitting.items() for dialogue in kept]
    costs = list(
        zip(
            side_by_side(lambda item: _model_bits(engine, item[1]), order),
            _token_bits(engine, sample.training, [dialogue for _, dialogue in order]),
            _byte_bits(sample.training, [dialogue for _, dialogue in order]),
            strict=True,
        )
    )
    found = {}
    for wanted in [*(name for name, kept in fitting.items() if kept), "all"]:
        chosen = [at for at, (name, _) in enumerate(order) if wanted in (name, "all")]
        size = text_bytes(order[at][1] for at in chosen)
        sums = [sum(costs[at][which] for at in chosen) / size for which in range(3)]
        found[wanted] = Bits(len(chosen), size, *sums)
    return found


def _fitting(engine: ChatEngine, dialogues: Iterable[Dialogue]) -> list[Dialogue]:
    return [d for d in dialogues if len(_ids(engine, d)) <= engine.max_context]


def _ids(engine: ChatEngine, dialogue: Dialogue) -> list[int]:
    return engine.tokenizer.encode(render(dialogue), add_special_tokens=False)


def _model_bits(engine: ChatEngine, dialogue: Dialogue) -> float:
    return -sum(engine.score(_ids(engine, dialogue))) / math.log(2)


def _token_bits(
    engine: ChatEngine, training: Iterable[Dialogue], held_out: Iterable[Dialogue]
) -> list[float]:
    # The token that starts every dialogue is given, as it is to the model.
    learnt = (_ids(engine, dialogue)[1:] for dialogue in training)
    begin = engine.tokenizer.special_texts[BEGIN]
    model = NGram(learnt, symbols=engine.core.vocab_size, begin=begin, order=ORDER)
    return [model.bits(_ids(engine, dialogue)[1:]) for dialogue in held_out]


def _byte_bits(training: Iterable[Dialogue], held_out: Iterable[Dialogue]) -> list[float]:
    model = NGram(map(_symbols, training), symbols=_BEGIN + 1, begin=_BEGIN, order=ORDER)
    return [model.bits(_symbols(dialogue)) for dialogue in held_out]


def _symbols(dialogue: Dialogue) -> list[int]:
    return [symbol for m in dialogue for symbol in (*m["content"].encode(), _END)]


@dataclass(frozen=True)
class XzBits:
    """Bits per byte of message text by xz -9e: alone, and after the training text."""

    alone: float
    after_training: float


def measure_xz(training: Sequence[Dialogue], held_out: Sequence[Dialogue]) -> XzBits:
    """Returns the cost of the held-out text in xz. A line feed ends each message, two a
    dialogue."""
    text, before = _plain(held_out), _plain(training)
    size = text_bytes(held_out)
    return XzBits(8 * xz_size(text) / size, 8 * (xz_size(before + text) - xz_size(before)) / size)


def _plain(dialogues: Iterable[Dialogue]) -> bytes:
    lines = ("".join(m["content"] + "\n" for m in dialogue) + "\n" for dialogue in dialogues)
    return "".join(lines).encode()


def xz_size(data: bytes) -> int:
    """Returns the size of the file that `xz -9e` makes of `data`, in bytes."""
    return len(lzma.compress(data, preset=_XZ))
