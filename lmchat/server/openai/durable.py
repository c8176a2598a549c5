"""A chat completion as the next turn of a durable session."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, cast

from lmchat.aio.stream import AsyncFollower
from lmchat.engine import ChatEngine
from lmchat.errors import InvalidRequest, NotFound, SessionBusy
from lmchat.generation.generation import Generation
from lmchat.generation.parts import Delta, Progress
from lmchat.generation.reply import Reply
from lmchat.generation.settings import GenerationSettings, StatelessSettings
from lmchat.server.errors import HttpError, named, refusal, unsupported
from lmchat.server.retries.door import Door, Prepare, open_door
from lmchat.server.retries.entries import Entries
from lmchat.server.retries.entry import Entry
from lmchat.server.retries.keys import digest_of
from lmchat.server.state import ServerState
from lmchat.sessions.session import Session
from lmchat.store.records import SESSION_ID
from lmchat.store.turns import Message
from turbomind.shown import shown

OF_NO_SESSION = ("n", "skip_special_tokens")
"""Settings that only a generation without a session has."""


class EntryStream:
    """The parts of a session's reply, as `Parts` reads them. Its entry decides when it stops.

    Args:
        entry: the entry of the request.
    """

    def __init__(self, entry: Entry) -> None:
        assert entry.answer is not None
        self._entry = entry
        self._follower = AsyncFollower(entry.answer.follow())

    @property
    def reply(self) -> Reply | None:
        """The whole reply; None before its end."""
        reply = self._follower.reply
        return None if reply is None else self._entry.whole(reply)

    async def take(self) -> list[Delta | Progress]:
        """Waits for parts and returns all that there are. Returns an empty list at the end.

        Raises:
            Error: the generation failed before its first token.
        """
        parts = await self._follower.take()
        if not parts:
            await self._follower.result()
        return parts

    async def aclose(self) -> None:
        """Ends the reading."""
        self._follower.close()


async def session_turn(
    state: ServerState,
    owner: str,
    session: str,
    messages: Sequence[Message],
    continues: bool,
    variables: dict[str, Any] | None,
    settings: StatelessSettings,
    key: str | None,
) -> Entry:
    """Sends the last message to a session, or takes over the turn of an equal request.

    Args:
        state: the server's state.
        owner: the session's owner.
        session: its id, else its name. A missing one is created.
        messages: the new turn, and maybe all messages before it.
        continues: whether the request wants the last message continued.
        variables: variables for the chat template.
        settings: settings of the generation.
        key: the `Idempotency-Key`, or None.

    Returns:
        The entry of the request, to which its client is attached.

    Raises:
        HttpError: the messages do not agree with the session, or a field does not fit a session.
        SessionBusy: the session is generating.
    """
    if continues:
        raise unsupported("continue_final_message", "a session continues its own reply")
    for field in OF_NO_SESSION:
        if settings.get(field) is not None:
            raise unsupported(field, "a session's reply has one choice, without special tokens")
    of_turn = {name: value for name, value in settings.items() if name not in OF_NO_SESSION}
    last = len(messages) - 1
    if messages[last]["role"] != "user":
        seen = shown(messages[last]["role"])
        raise refusal(f"messages[{last}].role", seen, "'user': it is the session's next turn")
    given = {name: value for name, value in of_turn.items() if value is not None}
    digest = digest_of("chat", {"messages": list(messages), "variables": variables, **given})

    def sessions() -> list[Session]:
        found = _found(state.engine.sync, owner, session)
        return [] if found is None else [found]

    def start(prepare: Prepare, _at: Session | None) -> tuple[Session, Generation]:
        found = _opened(state, owner, session, messages)
        metadata, check = prepare(found)
        return found, found.start_send(
            messages[last]["content"],
            template_variables=variables,
            metadata=metadata,
            request=digest,
            check=check,
            **cast(GenerationSettings, of_turn),
        )

    door = Door(
        owner,
        digest,
        sessions,
        start,
        key=key,
        body=digest,
        scope=session,
        is_relayed="logprobs" not in given,
    )
    return await open_door(state.part(Entries), door)


def _opened(state: ServerState, owner: str, session: str, messages: Sequence[Message]) -> Session:
    """Returns the session, whose turns agree with the earlier messages."""
    has_system = len(messages) > 1 and messages[0]["role"] in ("system", "developer")
    system = messages[0]["content"] if has_system else None
    earlier = messages[has_system:-1]
    found = _found(state.engine.sync, owner, session)
    if found is None:
        if earlier:
            raise _differs(int(has_system))
        return _created(state, owner, session, system)
    if found.running is not None:
        raise SessionBusy("the session is generating; wait for its reply, or stop it")
    if system is not None and system != found.system:
        raise _differs(0)
    if earlier:
        turns = [turn for turn in found.turns if turn.role != "system"]
        said = [*found.dropped, *turns]  # a client still has what a full context has dropped
        _compare(said if len(earlier) == len(said) else turns, earlier, int(has_system))
    return found


def _found(engine: ChatEngine, owner: str, session: str) -> Session | None:
    """Returns the owner's session of this id, else of this name, else None."""
    if re.fullmatch(SESSION_ID, session):
        with contextlib.suppress(NotFound):
            return engine.session_by_id(session, owner=owner)
    try:
        return engine.session_by_name(session, owner=owner)
    except NotFound:
        return None
    except InvalidRequest as error:
        raise named(error, {"name": "session"}) from None


def _created(state: ServerState, owner: str, name: str, system: str | None) -> Session:
    engine = state.engine.sync
    engine.check_capacity(owner)  # a session whose first turn is refused is not created
    try:
        with state.names.holding((owner, name)), state.session_limit.room(owner):
            return engine.session(name, owner=owner, system=system)
    except InvalidRequest as error:
        raise named(error, {"name": "session", "system": "messages[0]"}) from None


def _compare(turns: Sequence[Any], earlier: Sequence[Message], first: int) -> None:
    """Raises HttpError unless the messages are the turns. White space at their ends is ignored.

    Args:
        turns: turns of the session, without its system prompt.
        earlier: messages before the new one, without the system prompt.
        first: index of the first of these in the request.
    """
    for i, message in enumerate(earlier):
        turn = turns[i] if i < len(turns) else None
        if turn is None or (turn.role, turn.text.strip()) != (
            message["role"],
            message["content"].strip(),
        ):
            raise _differs(first + i)
    if len(turns) > len(earlier):
        raise _differs(first + len(earlier))


def _differs(at: int) -> HttpError:
    field = f"messages[{at}]"
    return HttpError(
        400,
        f"{field} differs from the session's turns, expected these and one new message, or the "
        "new message alone",
        param=field,
        code="session_mismatch",
    )
