"""Turns made from texts that no model generated here, to be appended to a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmchat.sessions.planner import Planner
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn, TurnTree
from turbomind.params import wrong

_SEPARATOR = "\n\n"

PARTS = "parts"
"""Key in a turn's metadata: lengths of the messages that its text is joined of, if several."""


@dataclass(frozen=True)
class Said:
    """A text, and the lengths of the messages that it is joined of; empty: it is one message."""

    text: str = ""
    parts: tuple[int, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Said:
        """Returns texts as one, with empty lines between them. Empty ones are left out."""
        found = [text for text in texts if text]
        return cls(_SEPARATOR.join(found), tuple(map(len, found)) if len(found) > 1 else ())

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Said:
        """Returns the text of a message of `Session.append()` and its parts."""
        return cls(message["content"], tuple(message.get(PARTS) or ()))

    def then(self, later: Said) -> Said:
        """Returns both as one text with an empty line between them."""
        if not self.text or not later.text:
            return self if self.text else later
        lengths = [one.parts or (len(one.text),) for one in (self, later)]
        return Said(joined(self.text, later.text), (*lengths[0], *lengths[1]))

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of its turn."""
        return {PARTS: list(self.parts)} if self.parts else {}

    @property
    def unanswered(self) -> dict[str, Any]:
        """Fields of a session's record in which it waits for a reply."""
        return {"unanswered": self.text, "unanswered_parts": self.parts}


def said_in(turn: Turn) -> Said:
    """Returns what a turn says. Metadata that does not fit its text is ignored."""
    parts = turn.metadata.get(PARTS, ())
    return Said(turn.text, () if texts_of(turn.text, parts) is None else tuple(parts))


Round = tuple[Said, Said]
"""What a user said, and the reply."""


@dataclass(frozen=True)
class Place:
    """Where in a session a message goes, and what is changed there for it.

    The changes are stored together with the reply, so a refused message changes nothing.

    Attributes:
        after: id of the reply that the message follows; None: the last turn.
        system: the system prompt from now on, empty for none; None: the one that is there.
        rounds: rounds between that reply and the message.
        overflow: what happens if this turn does not fit the context; None: the session's.
        keeps_question: whether the message becomes the session's unanswered one if it is cancelled
            before the first token.
        metadata: JSON values by key that the reply gets.
        request: digest of the client's request that the turn answers; empty: it has none.
        check: called with the stored turns that a plan starts from. The generation is refused with
            its error. No other process can store a turn between the check and the start.
    """

    after: int | None = None
    system: str | None = None
    rounds: tuple[Round, ...] = ()
    overflow: str | None = None
    keeps_question: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    request: str = ""
    check: Callable[[TurnTree], object] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts that are new in the session."""
        return [self.system or "", *(said.text for one in self.rounds for said in one)]


def rounds_of_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Round], Said]:
    """Returns the rounds of messages, and a last user message without a reply.

    Raises:
        InvalidRequest: users and assistants do not alternate, a content is not a string, or its
            parts are not those of it.
    """
    rounds: list[Round] = []
    question = Said()
    for number, message in enumerate(messages):
        role, text = message.get("role"), message.get("content")
        if not isinstance(text, str):
            raise wrong(f"messages[{number}].content", text, "a string")
        expected = "assistant" if number % 2 else "user"
        if role != expected:
            expected = f"{expected!r}: users and assistants take turns"
            raise wrong(f"messages[{number}].role", role, expected)
        parts = message.get(PARTS)
        if parts and texts_of(text, parts) is None:
            expected = "lengths of strings that empty lines join to content"
            raise wrong(f"messages[{number}].{PARTS}", parts, expected)
        said = Said.from_message(message)
        if expected == "user":
            question = said
        else:
            rounds.append((question, said))
            question = Said()
    return rounds, question


def texts_of(text: str, parts: Any) -> list[str] | None:
    """Returns the texts that a text is joined of by lengths; None: it is not joined so."""
    if not isinstance(parts, list | tuple) or any(type(one) is not int or one < 1 for one in parts):
        return None
    texts, at = [], 0
    for length in parts:
        texts.append(text[at : at + length])
        at += length + len(_SEPARATOR)
    fits = at - len(_SEPARATOR) == len(text) and _SEPARATOR.join(texts) == text
    return texts if fits else None


def appended(runtime: Runtime, record: SessionRecord, rounds: Sequence[Round]) -> list[Turn]:
    """Returns new turns that follow the session's conversation, not in its tree yet.

    Raises:
        InvalidRequest: the template refuses the conversation, or a text cannot be encoded.
    """
    planner = Planner(runtime, record)
    before = record.tree.path(record.leaf)
    made: list[Turn] = []
    for question, said in rounds:
        user = planner.user_after([*before, *made], question.text)[0]
        user = replace(user, metadata=question.metadata)
        made += [user, reply_to(runtime, record, user, said)]
    return made


def reply_to(runtime: Runtime, record: SessionRecord, user: Turn, said: Said) -> Turn:
    """Returns a message as a complete reply to a user turn, not in the session's tree yet."""
    text = said.text
    ids = tuple(runtime.builder.reply_tokens(text))
    return Turn(
        id=record.tree.new_id(),
        parent=user.id,
        role="assistant",
        text=text,
        message=runtime.builder.reply_message(text, "", text),
        token_ids=ids,
        prefix_length=user.length,
        length=user.length + len(ids),
        finish_reason="stop",
        settings=runtime.identity.marked({}),
        metadata=said.metadata,
    )


def joined(before: str, text: str) -> str:
    """Returns two messages of one user as one, with an empty line between them."""
    return f"{before}{_SEPARATOR}{text}" if before and text else before or text
