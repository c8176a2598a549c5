"""What the grammar makes: chats, and where in them a fact is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass
class Fact:
    """A fact of a chat: its kind, the words of its slots, its values from the first to the last."""

    kind: str
    slots: dict[str, str]
    values: list[str]
    told: int  # the user turn, from 0, that told the last of them

    @property
    def value(self) -> str:
        """The value that holds now."""
        return self.values[-1]


@dataclass(frozen=True)
class Check:
    """A question for a fact: the message at `index` answers it and has to contain `value`, in which
    "my" may have become "your".

    `stale` are earlier values, which must not be in the answer; `distance` counts the user turns
    since the value was told (1: the turn before).
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
        """How many messages the user has sent."""
        return sum(message["role"] == "user" for message in self.messages)

    def add(self, question: str, answer: str) -> None:
        """A message of the user and its reply."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})
