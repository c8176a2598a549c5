"""Turns made from texts that no model generated here, to be appended to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmchat.errors import InvalidRequest
from lmchat.sessions.planner import Planner
from lmchat.sessions.runtime import Runtime
from lmchat.store.records import SessionRecord
from lmchat.store.turns import Turn

Round = tuple[str, str]
"""A user's text and the reply's."""


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
    """

    after: int | None = None
    system: str | None = None
    rounds: tuple[Round, ...] = ()
    overflow: str | None = None
    keeps_question: bool = True


def rounds_of_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Round], str]:
    """Returns the rounds of messages, and the text of a last user message without a reply.

    Raises:
        InvalidRequest: users and assistants do not alternate, or a content is no text.
    """
    rounds: list[Round] = []
    question = ""
    for number, message in enumerate(messages):
        role, text = message.get("role"), message.get("content")
        if not isinstance(text, str):
            raise InvalidRequest(f"messages[{number}].content is no text")
        expected = "assistant" if number % 2 else "user"
        if role != expected:
            raise InvalidRequest(
                f"messages[{number}] is of {str(role)[:20]!r}, expected {expected!r}: users and "
                "assistants take turns"
            )
        if expected == "user":
            question = text
        else:
            rounds.append((question, text))
            question = ""
    return rounds, question


def appended(runtime: Runtime, record: SessionRecord, rounds: Sequence[Round]) -> list[Turn]:
    """Returns new turns that follow the session's conversation, not in its tree yet.

    Raises:
        InvalidRequest: the template refuses the conversation, or a text cannot be encoded.
    """
    planner = Planner(runtime, record)
    before = record.tree.path(record.leaf)
    made: list[Turn] = []
    for question, answer in rounds:
        user = planner.user_after([*before, *made], question)[0]
        ids = tuple(runtime.tokenizer.encode(answer, parse_special=False))
        reply = Turn(
            id=record.tree.new_id(),
            parent=user.id,
            role="assistant",
            text=answer,
            message=runtime.builder.reply_message(answer, "", answer),
            token_ids=ids,
            prefix_length=user.length,
            length=user.length + len(ids),
            finish_reason="stop",
            settings=runtime.identity.marked({}),
        )
        made += [user, reply]
    return made


def joined(before: str, text: str) -> str:
    """Returns two messages of one user as one, with an empty line between them."""
    return f"{before}\n\n{text}" if before and text else before or text
