"""Chats of the grammar, and the positions at which they ask for a fact."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass
class Fact:
    """A fact of a chat: its kind, the words of its slots, and its values, oldest first."""

    kind: str
    slots: dict[str, str]
    values: list[str]
    told: int  # the user turn, from 0, that stated the last of them

    @property
    def value(self) -> str:
        """The current value."""
        return self.values[-1]


@dataclass(frozen=True)
class Check:
    """A question for a fact: the message at `index` answers it and must contain `value`, in which
    "my" may have become "your".

    `stale` are earlier values, which must not be in the answer. `distance` is the number of user
    turns since the value was stated (1: the turn before).
    """

    index: int
    kind: str
    value: str
    stale: tuple[str, ...]
    distance: int


@dataclass
class Chat:
    """A chat with its checks. Messages are {"role", "content"} as chat templates take them."""

    messages: list[Message] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Number of the user's messages."""
        return sum(message["role"] == "user" for message in self.messages)

    def add(self, question: str, answer: str) -> None:
        """Adds a message of the user and its reply."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})
