"""The real dialogues that memo is trained on, with their licences. One in fifty is held out.

Files are lzma-compressed JSON lines {"id", "messages": [{"role", "content"}]}.
"""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.grammar.chats import Message

_HELD_OUT_OF = 50


@dataclass(frozen=True)
class Corpus:
    """A set of dialogues whose licence allows shipping a model trained on it.

    `repeats` is how often a dialogue is seen while one of a large set is seen once.
    """

    name: str
    source: str
    licence: str
    repeats: int = 1

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{self.name}.jsonl.xz"


CORPORA = (
    Corpus("self_dialogue_corpus", "github.com/jfainberg/self_dialogue_corpus", "BSD-3-Clause"),
    Corpus("taskmaster4_coffee", "github.com/google-research-datasets/Taskmaster", "CC-BY-4.0"),
    Corpus("gsm8k_train", "github.com/openai/grade-school-math", "MIT"),
    Corpus(
        "microsoft_personality_chat", "github.com/microsoft/BotBuilder-PersonalityChat", "MIT", 4
    ),
    Corpus(
        "chatterbot_corpus_english", "github.com/gunthercox/chatterbot-corpus", "BSD-3-Clause", 3
    ),
    Corpus("open_datasets_conversational", "github.com/paredezadrian/open-datasets", "MIT", 3),
    Corpus("fastchat_dummy_identity", "github.com/lm-sys/FastChat", "Apache-2.0", 2),
)

# The identity questions were written for another model; memo answers them with its own.
_IDENTITY = (
    ("Large Model Systems Organization (LMSYS)", "the lmchat project"),
    ("researchers from the lmchat project", "the lmchat project"),
    ("Vicuna", "memo"),
)
# memo cannot calculate, so it learns to decline more often than to try. Three problems in five have
# one of these in place of their solution.
_REFUSED_OF_FIVE = 3
_REFUSALS = (
    "I'm too small for math problems, sorry.",
    "I can't calculate that. I'm a very small model.",
    "I'm sorry, I can't solve math problems.",
    "I'd only guess. Math is too hard for me.",
    "I can't do that kind of math, but I can remember things for you.",
)
# Dialogues with these words are not trained on. The short sets joke about people in distress.
_UNFIT = re.compile(
    r"\b(suicid\w*|kill (?:my|your)self|want to die|rap(?:e[ds]?|ist)|porn\w*|nazis?|hitler)\b",
    re.I,
)
_UNFIT_SHORT = re.compile(r"\b(sad|lonely|die|dead|deathless|kill\w*|murder\w*|sexy?)\b", re.I)
# System prompts for dialogues between people, who are not memo.
_PEOPLE = "self_dialogue_corpus"
_PROMPTED_OF_TEN = 6
_PROMPTS = (
    "Two people talk about {}.",
    "A conversation between two people about {}.",
    "You are a person who likes to talk about {}.",
    "You chat about {} as a person would.",
)
_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
    | {"\u2026": "...", "\u00a0": " "}
)


def read(folder: Path, corpus: Corpus, *, held_out: bool = False) -> list[list[Message]]:
    """Returns the dialogues of a corpus, to train on or held out, in the order of the file.

    Those to train on exclude unwanted topics and decline most math problems. Most of those between
    people have a system prompt in front.
    """
    with lzma.open(folder / corpus.file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    chats = []
    for row in rows:
        number, kept = divmod(zlib.crc32(row["id"].encode()), _HELD_OUT_OF)
        if (kept == 0) == held_out:
            chat = list(_clean(row["messages"], corpus))
            if held_out:
                chats.append(chat)
            elif not _is_unfit(chat):
                chats.append(_prepared(chat, corpus, number, row.get("topic", "")))
    return chats


def _is_unfit(chat: list[Message]) -> bool:
    said = "\n".join(message["content"] for message in chat)
    return bool(_UNFIT.search(said) or (len(chat) == 2 and _UNFIT_SHORT.search(said)))


def _prepared(chat: list[Message], corpus: Corpus, number: int, topic: str) -> list[Message]:
    if corpus.name == "gsm8k_train" and number % 5 < _REFUSED_OF_FIVE:
        return [*chat[:-1], {**chat[-1], "content": _REFUSALS[number // 5 % len(_REFUSALS)]}]
    if corpus.name == _PEOPLE and topic and number % 10 < _PROMPTED_OF_TEN:
        prompt = _PROMPTS[number // 10 % len(_PROMPTS)].format(topic.replace("_", " "))
        return [{"role": "system", "content": prompt}, *chat]
    return chat


def read_all(folder: Path, *, held_out: bool = False) -> list[list[Message]]:
    """Returns the dialogues of all corpora, each once."""
    return [chat for corpus in CORPORA for chat in read(folder, corpus, held_out=held_out)]


def _clean(messages: list[Message], corpus: Corpus) -> Iterator[Message]:
    for message in messages:
        text = message["content"].translate(_TYPOGRAPHY).strip()
        if corpus.name == "fastchat_dummy_identity":
            for old, new in _IDENTITY:
                text = text.replace(old, new)
        yield {"role": message["role"], "content": text}
