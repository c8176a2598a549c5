"""The real dialogues memo is trained on, with their licences; one in fifty is held out.

Files are lzma-compressed JSON lines {"id", "messages": [{"role", "content"}]}.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.grammar.chats import Message

_HELD_OUT_OF = 50


@dataclass(frozen=True)
class Corpus:
    """A set of dialogues whose licence allows a model trained on it to be shipped.

    `repeats` is how often a dialogue is seen where a large set's is seen once.
    """

    name: str
    source: str
    licence: str
    repeats: int = 1

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.name}.jsonl.xz"


CORPORA = (
    Corpus("self_dialogue_corpus", "github.com/jfainberg/self_dialogue_corpus", "BSD-3-Clause"),
    Corpus("taskmaster4_coffee", "github.com/google-research-datasets/Taskmaster", "CC-BY-4.0"),
    Corpus("gsm8k_train", "github.com/openai/grade-school-math", "MIT"),
    Corpus(
        "microsoft_personality_chat", "github.com/microsoft/BotBuilder-PersonalityChat", "MIT", 8
    ),
    Corpus(
        "chatterbot_corpus_english", "github.com/gunthercox/chatterbot-corpus", "BSD-3-Clause", 5
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
_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
    | {"\u2026": "...", "\u00a0": " "}
)


def read(folder: Path, corpus: Corpus, *, held_out: bool = False) -> list[list[Message]]:
    """The dialogues of a corpus, those to train on or those held out, in the file's order."""
    with lzma.open(folder / corpus.file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        list(_clean(row["messages"], corpus))
        for row in rows
        if (zlib.crc32(row["id"].encode()) % _HELD_OUT_OF == 0) == held_out
    ]


def read_all(folder: Path, *, held_out: bool = False) -> list[list[Message]]:
    """The dialogues of all corpora, each once."""
    return [chat for corpus in CORPORA for chat in read(folder, corpus, held_out=held_out)]


def _clean(messages: list[Message], corpus: Corpus) -> Iterator[Message]:
    for message in messages:
        text = message["content"].translate(_TYPOGRAPHY).strip()
        if corpus.name == "fastchat_dummy_identity":
            for old, new in _IDENTITY:
                text = text.replace(old, new)
        yield {"role": message["role"], "content": text}
