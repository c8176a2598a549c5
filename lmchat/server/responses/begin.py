"""Starts the generation of a stored response: chooses the session, and where in it.

Everything here waits for the store, so it runs on another thread than the event loop's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from lmchat.engine import ChatEngine
from lmchat.errors import Error, InternalError, InvalidRequest, NotFound, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.server.errors import HttpError, in_field
from lmchat.server.keyed_locks import KeyedLocks
from lmchat.server.responses import RESPONSE, TAG, ids
from lmchat.server.responses.body import PromptBody, ResponseBody
from lmchat.server.responses.items import Input, message_of
from lmchat.server.responses.objects import DELETED, RECORD, is_chained
from lmchat.server.retries.door import Door, Prepare
from lmchat.server.retries.entry import Entry
from lmchat.server.retries.keys import digest_of
from lmchat.server.session_limit import SessionLimit
from lmchat.sessions.appended import Said, joined
from lmchat.sessions.session import Session
from lmchat.store.turns import Turn


@dataclass(frozen=True)
class Question:
    """A user message, and what is put before it: arguments of `Session.start_send()`."""

    said: Said
    before: list[dict[str, Any]]
    system: str


@dataclass(frozen=True)
class _New:
    """A response that is about to start.

    Attributes:
        owner: the owner.
        name: the name that a session of its own gets.
        body: the request.
        given: its input.
        digest: its digest.
        prepare: returns what its turn stores, and the check before its start.
        at: the session that an equal request made for itself, of which nothing is stored, or None.
        drops: gets what deletes a session of its own if there is no reply in the end.
    """

    owner: str
    name: str
    body: ResponseBody
    given: Input
    digest: str
    prepare: Prepare
    at: Session | None
    drops: list[Callable[[], None]]


class Beginner:
    """Starts and deletes responses of one engine, those of one session one by one."""

    def __init__(self, engine: ChatEngine, limit: SessionLimit) -> None:
        self._engine = engine
        self._limit = limit
        self._locks = KeyedLocks()

    def holding(self, session: Session) -> AbstractContextManager[None]:
        """Waits until no other request of this dialect changes the session, and keeps them off."""
        return self._locks.holding(session.id)

    def door(
        self,
        owner: str,
        body: ResponseBody,
        given: Input,
        key: str | None,
        drops: list[Callable[[], None]],
    ) -> Door:
        """Returns the request for a stored response.

        Args:
            owner: the owner.
            body: the request.
            given: its input.
            key: the `Idempotency-Key`, or None.
            drops: gets what is to be called after the end of a reply that has no turn, if the
                response has a session of its own. It may wait.

        Raises:
            HttpError: a field is wrong.
        """
        conversation = body.conversation_id()
        asked_for = body.compared()
        digest = digest_of("response", asked_for)
        scope = conversation or body.previous_response_id or ""
        own = session_name(RESPONSE, None if key is None else f"{scope} {key}")

        def sessions() -> list[Session]:
            if conversation is not None:
                return [self._conversation(owner, conversation)]
            if key is None:
                return self._equal(owner, digest)
            return self._keyed(owner, body.previous_response_id, own)

        def start(prepare: Prepare, at: Session | None) -> tuple[Session, Generation]:
            self._engine.check_capacity(owner, live=bool(scope))  # before anything is written
            new = _New(owner, own, body, given, digest, prepare, at, drops)
            if conversation is not None:
                return self._in_conversation(self._conversation(owner, conversation), new)
            if body.previous_response_id is not None:
                return self._after(body.previous_response_id, new)
            make = functools.partial(self.new_session, owner, RESPONSE)
            with self._alone(new, lambda name: make(name=name), 0) as one:
                return one, self._send(one, new, asked(body, given))

        return Door(
            owner,
            digest,
            sessions,
            start,
            key=key,
            body=digest_of("response", {**asked_for, "metadata": body.metadata}),
            scope=scope,
            is_named=conversation is not None,
            detach=body.background,
            is_relayed=not body.has_logprobs,
            carried=RECORD,
            overflow=_overflow(body),
        )

    def _conversation(self, owner: str, session_id: str) -> Session:
        with in_field("conversation"):
            return find(self._engine, owner, session_id, "conv")

    def _equal(self, owner: str, digest: str) -> list[Session]:
        """Returns the sessions whose last turn answers an equal request."""
        found = []
        for session_id in self._engine._runtime.store.equal_requests(owner, digest):
            with contextlib.suppress(NotFound):  # it has been deleted meanwhile
                found.append(self._engine.session_by_id(session_id, owner=owner))
        return found

    def _keyed(self, owner: str, previous: str | None, own: str) -> list[Session]:
        """Returns the sessions in which the turn of a key may be."""
        found = []
        with contextlib.suppress(NotFound, HttpError):
            found.append(self._engine.session_by_name(own, owner=owner))
        if previous is not None:
            with contextlib.suppress(HttpError):
                session_id, _ = ids.turn_of("resp", previous)
                found.append(find(self._engine, owner, session_id, "resp"))
        return found

    def new_session(
        self,
        owner: str,
        kind: str,
        metadata: dict[str, str] | None = None,
        name: str | None = None,
    ) -> Session:
        """Creates a session of this dialect.

        Args:
            owner: its owner.
            kind: first word of its name.
            metadata: texts by key.
            name: its name; the session that has it is opened. None: a new one.

        Raises:
            HttpError: the owner has too many.
        """
        with self._limit.room(owner):
            return self._engine.session(
                name or session_name(kind), owner=owner, tags=[TAG], metadata=metadata
            )

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

    def _in_conversation(self, session: Session, new: _New) -> tuple[Session, Generation]:
        with self.holding(session):
            question = asked(new.body, new.given, session.turns, waiting_in(session))
            return session, self._send(session, new, question, conversation=True)

    def _after(self, previous: str, new: _New) -> tuple[Session, Generation]:
        """Answers an earlier response: as a branch of its session, else in a fork."""
        with in_field("previous_response_id"):
            session_id, turn = ids.turn_of("resp", previous)
            session = find(self._engine, new.owner, session_id, "resp", previous)
        with self.holding(session):
            with in_field("previous_response_id"):
                turns = past(session, turn, previous)
            question = asked(new.body, new.given, turns)
            # A conversation goes on with its own responses only, a user's session with its turns.
            if TAG in session.tags and is_chained(turns):
                with contextlib.suppress(SessionBusy):
                    return session, self._send(session, new, question, after=turn)

            def fork(name: str) -> Session:
                with self._limit.room(new.owner):
                    return session.fork(name, after=turn, tags=[TAG])

            if new.at is not None and new.at.id == session_id:
                new = replace(new, at=None)
            with self._alone(new, fork, len(turns)) as one:
                return one, self._send(one, new, question)

    @contextlib.contextmanager
    def _alone(self, new: _New, make: Callable[[str], Session], turns: int) -> Iterator[Session]:
        """Yields a session for one response alone: that of an equal request of which nothing is
        stored, or a new one. It is deleted if the response is refused.

        The name of a new one with a key is that of the key, so that every process finds it. If it
        has more turns than a new one, the key is an old one.

        Args:
            new: the response.
            make: makes a session of a name.
            turns: number of turns of a new one.
        """
        session = new.at
        if session is None:
            try:
                session = make(new.name)
            except InvalidRequest:  # another process has just made the fork of this name
                with contextlib.suppress(NotFound):
                    session = self._engine.session_by_name(new.name, owner=new.owner)
                if session is None:
                    raise
            if len(session._record.tree) > turns:
                new.prepare(session)[1](session._record.tree)
                session = make(session_name(RESPONSE))
        drop = functools.partial(drop_empty, session, len(session._record.tree))
        try:
            yield session
        except BaseException:
            drop()
            raise
        new.drops.append(drop)

    def _send(
        self,
        session: Session,
        new: _New,
        question: Question,
        *,
        after: int | None = None,
        conversation: bool = False,
    ) -> Generation:
        body = new.body
        record = {"created_at": int(time.time()), **body.echo()}
        if conversation:
            record["conversation"] = True
        metadata, check = new.prepare(session)
        generation = session.start_send(
            question.said.text,
            template_variables=body.chat_template_kwargs,
            after=after,
            before=question.before,
            system=question.system,
            overflow=_overflow(body),
            keep_question=False,
            metadata={RECORD: record, **question.said.metadata, **metadata},
            request=new.digest,
            check=check,
            **body.settings(),
        )
        if generation.turn_id is None:
            generation.cancel()
            raise InternalError("a response has no turn, expected one after its start")
        return generation


def drop_empty(session: Session, turns: int) -> None:
    """Deletes a session that was made for one response, if it has no more than this many turns and
    no process generates in it."""
    with contextlib.suppress(Error):
        session.refresh()
        if session.running is None and len(session._record.tree) <= turns:
            session.delete()


def record_of(entry: Entry) -> dict[str, Any]:
    """Returns what the response of an entry repeats of its request."""
    session, answer = entry.session, entry.answer
    assert session is not None
    assert answer is not None
    with answer.follow() as follower:
        record = follower.metadata.get(RECORD)
    if record is None and answer.turn_id is not None:
        with contextlib.suppress(NotFound):
            record = session.conversation(answer.turn_id)[-2].metadata.get(RECORD)
    return dict(record or {})


def _overflow(body: ResponseBody) -> str | None:
    return "drop" if body.truncation == "auto" else None


def session_name(kind: str, key: str | None = None) -> str:
    """Returns a name of a session: that of a key, or a new one."""
    if key is not None:
        return f"{kind}-{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
    return f"{kind}-{secrets.token_hex(8)}"


def _is_used(session: Session) -> bool:
    """Returns whether a session is a conversation, generates, or has a response."""
    paths = [session.conversation(reply.id) for reply in session.replies]
    replied = any(not path[-1].metadata.get(DELETED) for path in paths)
    return replied or session.running is not None or not all(map(is_chained, paths))


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
