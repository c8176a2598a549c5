"""Starts the generation of a stored response: chooses the session, and where in it.

Everything here waits for the store, so it runs on another thread than the event loop's.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lmchat.engine import ChatEngine
from lmchat.errors import Error, InternalError, NotFound, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.server.errors import HttpError, in_field
from lmchat.server.keyed_locks import KeyedLocks
from lmchat.server.responses import RESPONSE, TAG, ids
from lmchat.server.responses.body import PromptBody, ResponseBody
from lmchat.server.responses.items import Input, message_of
from lmchat.server.responses.objects import DELETED, RECORD
from lmchat.server.session_limit import SessionLimit
from lmchat.sessions.appended import Said, joined
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn


@dataclass(frozen=True)
class Begun:
    """A response whose generation has started.

    Attributes:
        session: its session.
        generation: its generation.
        record: what the response repeats of its request.
        is_alone: whether the session was made for this response.
    """

    session: Session
    generation: Generation
    record: dict[str, Any]
    is_alone: bool

    def drop_empty(self) -> None:
        """Deletes a session that was made for this response, which got no reply."""
        if self.is_alone:
            with contextlib.suppress(Error):
                self.session.delete()


@dataclass(frozen=True)
class Question:
    """A user message, and what is put before it: arguments of `Session.start_send()`."""

    said: Said
    before: list[dict[str, Any]]
    system: str


class Beginner:
    """Starts and deletes responses of one engine, those of one session one by one."""

    def __init__(self, engine: ChatEngine, limit: SessionLimit) -> None:
        self._engine = engine
        self._limit = limit
        self._locks = KeyedLocks()

    def holding(self, session: Session) -> AbstractContextManager[None]:
        """Waits until no other request of this dialect changes the session, and keeps them off."""
        return self._locks.holding(session.id)

    def begin(self, owner: str, body: ResponseBody, given: Input) -> Begun:
        """Starts a response. A refused one has changed nothing.

        Raises:
            HttpError, Error: it cannot be made.
        """
        conversation = body.conversation_id()
        if conversation is not None:
            with in_field("conversation"):
                session = find(self._engine, owner, conversation, "conv")
            with self.holding(session):
                question = asked(body, given, session.turns, waiting_in(session))
                return self._send(session, body, question, conversation=True)
        if body.previous_response_id is not None:
            return self._after(owner, body.previous_response_id, body, given)
        question = asked(body, given)
        session = self.new_session(owner, RESPONSE)
        return self._send_first(session, body, question)

    def new_session(self, owner: str, kind: str, metadata: dict[str, str] | None = None) -> Session:
        """Creates a session of this dialect.

        Args:
            owner: its owner.
            kind: first word of its name.
            metadata: texts by key.

        Raises:
            HttpError: the owner has too many.
        """
        with self._limit.room(owner):
            return self._engine.session(_name(kind), owner=owner, tags=[TAG], metadata=metadata)

    def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response; the last one that its session has, with the session.

        Raises:
            HttpError: there is none.
        """
        session_id, turn = ids.turn_of("resp", response_id)
        session = find(self._engine, owner, session_id, "resp", response_id)
        with self.holding(session):
            reply = past(session, turn, response_id)[-1]
            session.annotate(turn, {**reply.metadata, DELETED: True})
            if TAG in session.tags and not _is_used(session):
                session.delete()

    def _after(self, owner: str, previous: str, body: ResponseBody, given: Input) -> Begun:
        """Answers an earlier response: as a branch of its session, else in a fork."""
        with in_field("previous_response_id"):
            session_id, turn = ids.turn_of("resp", previous)
            session = find(self._engine, owner, session_id, "resp", previous)
        with self.holding(session):
            with in_field("previous_response_id"):
                turns = past(session, turn, previous)
            question = asked(body, given, turns)
            # A conversation goes on with its own responses only, a user's session with its turns.
            if TAG in session.tags and is_chained(turns):
                with contextlib.suppress(SessionBusy):
                    return self._send(session, body, question, after=turn)
            with self._limit.room(owner):
                fork = session.fork(_name(RESPONSE), after=turn, tags=[TAG])
        return self._send_first(fork, body, question)

    def _send_first(self, session: Session, body: ResponseBody, question: Question) -> Begun:
        try:
            return self._send(session, body, question, is_alone=True)
        except BaseException:
            session.delete()
            raise

    def _send(
        self,
        session: Session,
        body: ResponseBody,
        question: Question,
        *,
        after: int | None = None,
        conversation: bool = False,
        is_alone: bool = False,
    ) -> Begun:
        record = {"created_at": int(time.time()), **body.echo()}
        if conversation:
            record["conversation"] = True
        generation = session.start_send(
            question.said.text,
            template_variables=body.chat_template_kwargs,
            after=after,
            before=question.before,
            system=question.system,
            overflow="drop" if body.truncation == "auto" else None,
            keep_question=False,
            metadata={RECORD: record, **question.said.metadata},
            **body.settings(),
        )
        if generation.turn_id is None:
            generation.cancel()
            raise InternalError("a response has no turn, expected one after its start")
        return Begun(session, generation, record, is_alone)


def _name(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(8)}"


def _is_used(session: Session) -> bool:
    """Returns whether a session is a conversation, generates, or has a response."""
    paths = [session.conversation(reply.id) for reply in session.replies]
    replied = any(not path[-1].metadata.get(DELETED) for path in paths)
    return replied or session.running is not None or not all(map(is_chained, paths))


def is_chained(turns: Sequence[Turn]) -> bool:
    """Returns whether a reply is a response that belongs to no conversation."""
    record = turns[-2].metadata.get(RECORD)
    return record is not None and not record.get("conversation")


def find(
    engine: ChatEngine, owner: str, session_id: str, kind: str, text: str | None = None
) -> Session:
    """Returns the owner's session of this id.

    Raises:
        HttpError: there is none; the answer names `text`, the id that the client sent.
    """
    try:
        return engine.session_by_id(session_id, owner=owner)
    except NotFound:
        named = text or ids.of_conversation(session_id)
        raise ids.not_found(kind, named) from None


def past(session: Session, turn: int, response_id: str) -> tuple[Turn, ...]:
    """Returns the turns up to a response's reply.

    Raises:
        HttpError: there is no such reply, it has not ended, or its response was deleted.
    """
    running = in_progress(session, turn)
    try:
        turns = session.conversation(turn)
    except NotFound:
        if running is not None:
            raise HttpError(
                409,
                f"the response {response_id!r} is in progress, expected a finished one",
                code="response_in_progress",
            ) from None
        raise ids.not_found("resp", response_id) from None
    if turns[-1].metadata.get(DELETED):
        raise ids.not_found("resp", response_id)
    return turns


def in_progress(session: Session, turn: int) -> dict[str, Any] | None:
    """Returns what a running response repeats of its request, or None. Any process may generate
    it."""
    try:
        follower = session.follow(turn)
    except NotFound:
        return None
    with follower:
        return None if follower.done else dict(follower.metadata.get(RECORD) or {})


def response_turns(
    engine: ChatEngine, owner: str, response_id: str
) -> tuple[tuple[Turn, ...], str]:
    """Returns the turns up to a response of the owner, and its session's id; raises HttpError as
    `past()`."""
    session_id, turn = ids.turn_of("resp", response_id)
    session = find(engine, owner, session_id, "resp", response_id)
    return past(session, turn, response_id), session_id


def asked(
    body: PromptBody, given: Input, turns: Sequence[Turn] = (), waiting: Said | None = None
) -> Question:
    """Returns the question of a request.

    Args:
        body: the request.
        given: its input.
        turns: the conversation before it.
        waiting: user messages at its end that have no reply.

    Raises:
        HttpError: the input does not end with a user message.
    """
    given.check_question()
    *before, last = after_waiting(given, waiting or Said())
    own = joined(own_system(turns), given.system)
    return Question(Said.from_message(last), before, joined(body.instructions or "", own))


def waiting_in(session: Session) -> Said:
    """Returns the user's messages at the end of a session that have no reply."""
    record = session._record
    return Said(record.unanswered, record.unanswered_parts)


def after_waiting(given: Input, waiting: Said, param: str = "input") -> list[dict[str, Any]]:
    """Returns the messages of an input, with a user's message that waits for a reply before."""
    first, *others = given.messages
    if first["role"] != "assistant":
        return [message_of("user", waiting.then(Said.from_message(first))), *others]
    if not waiting.text:
        raise HttpError(
            400, f"{param} begins with an assistant message, expected a user's first", param=param
        )
    return [message_of("user", waiting), first, *others]


def own_system(turns: Sequence[Turn]) -> str:
    """Returns the system text that belongs to a conversation itself, without the instructions of
    its last response."""
    system = turns[0].text if turns and turns[0].role == "system" else ""
    records = (turn.metadata.get(RECORD) for turn in reversed(turns))
    last = next((record for record in records if record), None) or {}
    instructions = str(last.get("instructions") or "")
    if instructions and system == instructions:
        return ""
    return system.removeprefix(f"{instructions}\n\n") if instructions else system


def count_input(engine: ChatEngine, owner: str, body: PromptBody, given: Input) -> int:
    """Returns the length of the prompt that a request would have, in tokens."""
    variables, conversation = body.chat_template_kwargs, body.conversation_id()
    if conversation is not None:
        with in_field("conversation"):
            session, turn = find(engine, owner, conversation, "conv"), None
        question = asked(body, given, session.turns, waiting_in(session))
    elif body.previous_response_id is not None:
        previous = body.previous_response_id
        with in_field("previous_response_id"):
            session_id, turn = ids.turn_of("resp", previous)
            session = find(engine, owner, session_id, "resp", previous)
            turns = past(session, turn, previous)
        question = asked(body, given, turns)
    else:
        messages = unstored_messages(body, given)
        return len(engine.chat_token_ids(messages, owner=owner, template_variables=variables))
    return session.count_tokens(
        question.said.text,
        template_variables=variables,
        after=turn,
        before=question.before,
        system=question.system,
    )


def unstored_messages(
    body: PromptBody, given: Input, turns: Sequence[Turn] = ()
) -> list[dict[str, Any]]:
    """Returns all messages of a request that is not stored, after the turns of a conversation."""
    question = asked(body, given, turns)
    head = [{"role": "system", "content": question.system}] if question.system else []
    said = [{"role": one.role, "content": one.text} for one in turns if one.role != "system"]
    before = [{"role": one["role"], "content": one["content"]} for one in question.before]
    return [*head, *said, *before, {"role": "user", "content": question.said.text}]
