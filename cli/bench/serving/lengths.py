"""Lengths of messages and replies: from a trace, from questions, or generated."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmchat.errors import InvalidRequest

from ..workload import LONGEST_MESSAGE, MESSAGE, Row

REPLY = 128  # tokens, where nothing says otherwise


class Lengths(Protocol):
    """A source of lengths."""

    @property
    def source(self) -> str:
        """Describes the lengths."""
        ...

    def draw(self, index: int, dice: random.Random) -> tuple[int, int]:
        """Returns the tokens of a message and of its reply.

        Args:
            index: Number of the conversation.
            dice: Chooses the lengths.
        """
        ...


@dataclass(frozen=True)
class Generated:
    """Messages of fixed or log-normal length, replies of fixed length."""

    message: int | None
    reply: int

    @property
    def source(self) -> str:
        """Describes the lengths."""
        middle, spread = MESSAGE
        messages = (
            f"messages of {self.message} tokens"
            if self.message is not None
            else f"log-normal messages (median {middle} tokens, sigma {spread}, "
            f"at most {LONGEST_MESSAGE})"
        )
        return f"{messages}, replies of {self.reply} tokens"

    def draw(self, index: int, dice: random.Random) -> tuple[int, int]:
        """See `Lengths`."""
        if self.message is not None:
            return self.message, self.reply
        middle, spread = MESSAGE
        length = round(dice.lognormvariate(math.log(middle), spread))
        return min(max(length, 1), LONGEST_MESSAGE), self.reply


@dataclass(frozen=True)
class FromQuestions:
    """Messages with the lengths of given questions, each equally likely."""

    name: str
    lengths: Sequence[int]
    reply: int

    @property
    def source(self) -> str:
        """Describes the lengths."""
        return f"messages as long as those of {self.name}, replies of {self.reply} tokens"

    def draw(self, index: int, dice: random.Random) -> tuple[int, int]:
        """See `Lengths`."""
        return dice.choice(self.lengths), self.reply


@dataclass(frozen=True)
class FromTrace:
    """Prompts and replies with the lengths of a trace, in its order."""

    name: str
    rows: Sequence[Row]
    reply: int | None

    @property
    def source(self) -> str:
        """Describes the lengths."""
        if self.reply is None:
            return f"prompts and replies as long as those of {self.name}"
        return f"prompts as long as those of {self.name}, replies of {self.reply} tokens"

    def draw(self, index: int, dice: random.Random) -> tuple[int, int]:
        """See `Lengths`."""
        row = self.rows[index % len(self.rows)]
        return max(row.context, 1), self.reply or max(row.generated, 1)


def read_questions(path: str) -> list[str]:
    """Reads the user messages of a file like MT-bench's: JSON lines with a list "turns".

    Raises:
        InvalidRequest: The file cannot be read as such.
    """
    try:
        with open(path, encoding="utf-8") as file:
            texts = [text for line in file if line.strip() for text in json.loads(line)["turns"]]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("a turn is not a text, or there is none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f'--questions is {path!r}, expected JSON lines with a list "turns" of texts: {error}'
        ) from None
    return texts


def counted_by(path: str, texts: Sequence[str]) -> list[int]:
    """Returns the tokens of each text by a tokenizer.json.

    Raises:
        InvalidRequest: The file cannot be read as such.
    """
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(path)
    except Exception as error:  # the library raises no narrower one
        raise InvalidRequest(
            f"--tokenizer is {path!r}, expected a tokenizer.json: {error}"
        ) from None
    return [max(1, len(found.encode(text, add_special_tokens=False).ids)) for text in texts]
