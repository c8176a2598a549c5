"""Starts the generation of a stored response: chooses the session, and where in it.

Everything here waits for the store, so it runs on another thread than the event loop's.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from lmchat.engine import ChatEngine
from lmchat.errors import InternalError, NotFound, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.server.config import Limits
from lmchat.server.responses import TAG, ids
from lmchat.server.responses.body import PromptBody, ResponseBody
from lmchat.server.responses.items import Input
from lmchat.server.responses.objects import DELETED, RECORD
from lmchat.sessions.appended import joined
from lmchat.sessions.session import Session

SYSTEM = "system"
"""Key in the record of a turn of the system text that is part of the conversation itself."""


@dataclass(frozen=True)
class Begun:
    """A response whose generation has started."""

    session: Session
    generation: Generation
    record: dict[str, Any]


class Beginner:
    """Starts responses of one engine. Requests for one conversation are started one by one."""

    def __init__(self, engine: ChatEngine, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits
        self._locks: weakref.WeakValueDictionary[str, _Lock] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()

    def begin(self, owner: str, body: ResponseBody, given: Input) -> Begun:
        """Starts a response.

        Raises:
            HttpError, Error: it cannot be made.
        """
        given.question  # noqa: B018  (refuses an input without one before anything is stored)
        conversation = body.conversation_id()
        if conversation is not None:
            session = find(self._engine, owner, conversation, "conv")
            with self._lock(session.id):
                return self._in_conversation(session, body, given)
        if body.previous_response_id is not None:
            return self._after(owner, body, given)
        return self._fresh(owner, body, given)

    def new_session(self, owner: str, kind: str, metadata: dict[str, str] | None = None) -> Session:
        """Creates a session of this dialect.

        Args:
            owner: its owner.
            kind: first word of its name.
            metadata: texts by key.
        """
        session = self._engine.session(
            f"{kind}-{secrets.token_hex(8)}", owner=owner, metadata=metadata
        )
        session.set_tags([TAG])
        return session

    def _fresh(self, owner: str, body: ResponseBody, given: Input) -> Begun:
        session = self.new_session(owner, "response")
        try:
            return self._send(session, body, given, given.system, after=None)
        except BaseException:
            session.delete()
            raise

    def _after(self, owner: str, body: ResponseBody, given: Input) -> Begun:
        """Answers an earlier response: as a branch of its session, else in a fork."""
        previous = str(body.previous_response_id)
        session_id, turn = ids.turn_of("resp", previous)
        session = find(self._engine, owner, session_id, "resp", previous)
        turns = past(session, turn, previous)
        own = own_system(turns)
        if given.system:
            own = joined(own, given.system)
        wanted = joined(body.instructions or "", own)
        has = turns[0].text if turns[0].role == "system" else ""
        if wanted == has and len(given.messages) == 1:
            try:
                return self._send(session, body, given, own, after=turn)
            except SessionBusy:
                pass
        fork = session.fork(f"response-{secrets.token_hex(8)}", after=turn)
        try:
            fork.set_tags([TAG])
            return self._send(fork, body, given, own, after=None)
        except BaseException:
            fork.delete()
            raise

    def _in_conversation(self, session: Session, body: ResponseBody, given: Input) -> Begun:
        turns = session.turns
        own = own_system(turns) if len(turns) > 1 else session.system or ""
        if given.system:
            own = joined(own, given.system)
        return self._send(session, body, given, own, after=None, conversation=True)

    def _send(
        self,
        session: Session,
        body: ResponseBody,
        given: Input,
        own: str,
        *,
        after: int | None,
        conversation: bool = False,
    ) -> Begun:
        system = joined(body.instructions or "", own)
        if after is None and system != (session.system or ""):
            session.set_system(system or None)
        if body.truncation == "auto" and session.overflow != "drop":
            session.set_overflow("drop")
        before = session.unanswered if conversation else None
        messages = list(given.messages)
        if before and messages[0]["role"] == "user":
            messages[0] = {**messages[0], "content": joined(before, messages[0]["content"])}
        if len(messages) > 1:
            session.append(messages[:-1])
        record = {"created_at": int(time.time()), **body.echo()}
        if own:
            record[SYSTEM] = own
        if conversation:
            record["conversation"] = True
        generation = session.start_send(
            messages[-1]["content"],
            template_variables=body.chat_template_kwargs,
            after=after,
            metadata={RECORD: record},
            **body.settings(),
        )
        if generation.turn_id is None:
            generation.cancel()
            raise InternalError("a response has no turn, expected one after its start")
        return Begun(session, generation, record)

    def _lock(self, session_id: str) -> _Lock:
        with self._guard:
            lock = self._locks.get(session_id)
            if lock is None:
                lock = self._locks[session_id] = _Lock()
            return lock


class _Lock:
    """A lock that can be weakly referenced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


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


def past(session: Session, turn: int, response_id: str) -> Any:
    """Returns the turns up to a response's reply.

    Raises:
        HttpError: there is no such reply, or its response was deleted.
    """
    try:
        turns = session.conversation(turn)
    except NotFound:
        raise ids.not_found("resp", response_id) from None
    if turns[-1].metadata.get(DELETED):
        raise ids.not_found("resp", response_id)
    return turns


def own_system(turns: Any) -> str:
    """Returns the system text that belongs to a conversation itself, without instructions."""
    users = [turn for turn in turns if turn.role == "user"]
    record = users[-1].metadata.get(RECORD) if users else None
    if record is None:
        return turns[0].text if turns and turns[0].role == "system" else ""
    return str(record.get(SYSTEM, ""))


def count_input(engine: ChatEngine, owner: str, body: PromptBody, given: Input) -> int | None:
    """Returns the length of the prompt of a stored conversation, in tokens; None without one."""
    conversation = body.conversation_id()
    if conversation is not None:
        session = find(engine, owner, conversation, "conv")
        return session.count_tokens(joined(session.unanswered or "", given.question))
    if body.previous_response_id is None:
        return None
    previous = body.previous_response_id
    session_id, turn = ids.turn_of("resp", previous)
    session = find(engine, owner, session_id, "resp", previous)
    past(session, turn, previous)
    return session.count_tokens(given.question, after=turn)
