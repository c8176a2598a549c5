"""A chat completion as the next turn of a durable session."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from lmchat.aio import AsyncSession
from lmchat.aio_stream import AsyncReplyStream
from lmchat.aio_threads import shared
from lmchat.engine import ChatEngine
from lmchat.errors import InvalidRequest, NotFound, SessionBusy
from lmchat.generation.settings import GenerationSettings, StatelessSettings
from lmchat.server.errors import HttpError
from lmchat.server.openai.sampling import refusal, unsupported
from lmchat.server.state import ServerState
from lmchat.sessions.session import Session
from lmchat.store.turns import Message
from turbomind.shown import shown

OF_NO_SESSION = ("n", "skip_special_tokens")
"""Settings that only a generation without a session has."""

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class SessionTurn:
    """The reply that a session is about to generate.

    Attributes:
        id: the session's id.
        stream: the reply.
    """

    id: str
    stream: AsyncReplyStream


async def session_turn(
    state: ServerState,
    owner: str,
    session: str,
    messages: Sequence[Message],
    continues: bool,
    variables: dict[str, Any] | None,
    settings: StatelessSettings,
) -> SessionTurn:
    """Sends the last message to a session, and returns its reply.

    Args:
        state: the server's state.
        owner: the session's owner.
        session: its id, else its name. A missing one is created.
        messages: the new turn, and maybe all messages before it.
        continues: whether the request wants the last message continued.
        variables: variables for the chat template.
        settings: settings of the generation.

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
    found = await shared.run(_opened, state, owner, session, messages)
    stream = await AsyncSession(found).send(
        messages[last]["content"],
        stream=True,
        template_variables=variables,
        **cast(GenerationSettings, of_turn),
    )
    return SessionTurn(found.id, stream)


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
        _compare(turns, earlier, int(has_system))
    return found


def _found(engine: ChatEngine, owner: str, session: str) -> Session | None:
    """Returns the owner's session of this id, else of this name, else None."""
    if _ID.fullmatch(session):
        with contextlib.suppress(NotFound):
            return engine.session_by_id(session, owner=owner)
    try:
        return engine.session_by_name(session, owner=owner)
    except NotFound:
        return None
    except InvalidRequest as error:
        raise HttpError(400, str(error), param="session") from None


def _created(state: ServerState, owner: str, name: str, system: str | None) -> Session:
    engine = state.engine.sync
    engine.check_capacity(owner)  # a session whose first turn is refused is not created
    try:
        with state.names.holding((owner, name)), state.session_limit.room(owner):
            return engine.session(name, owner=owner, system=system)
    except InvalidRequest as error:
        raise HttpError(400, str(error), param="messages[0]") from None


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
